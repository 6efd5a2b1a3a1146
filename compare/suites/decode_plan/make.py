"""Inputs of the suite ``decode-plan``."""

from __future__ import annotations

from itertools import accumulate

from compare.judging.plans import DecodePlanInputs
from compare.suites.decode_plan.case import DecodePlanCase


def decode_plan_inputs(case: DecodePlanCase) -> DecodePlanInputs:
    """The arguments of a planner of decode rows that a case describes."""
    return DecodePlanInputs(
        query_start_loc=tuple(accumulate(case.q, initial=0)),
        total_lens=case.lens,
        max_query_len=case.promised,
        causal=case.causal,
        num_rows=sum(case.q) + case.pad_rows,
        dcp_rank=case.rank,
        dcp_world=case.world,
        interleave=case.interleave,
        case=case,
    )
