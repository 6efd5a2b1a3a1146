"""Inputs of the planners' suites: the words of the case under the planner's own names."""

from __future__ import annotations

from itertools import accumulate

from compare.cases.decode_plan import DecodePlanCase
from compare.cases.inputs import DecodePlanInputs, PrefillPlanInputs
from compare.cases.prefill_plan import PrefillPlanCase


def prefill_plan_inputs(case: PrefillPlanCase) -> PrefillPlanInputs:
    """The planner's arguments that a case describes."""
    return PrefillPlanInputs(
        seq_lens=case.seq,
        query_lens=case.q,
        compress_ratio=case.ratio,
        window=case.window,
        max_model_len=case.max_len,
        max_num_batched_tokens=case.max_tokens,
        chunk_size=case.chunk,
        has_compressed=case.compressed,
        case=case,
    )


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
