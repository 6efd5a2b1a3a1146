"""Inputs of the suite ``prefill-plan``."""

from __future__ import annotations

from compare.judging.plans import PrefillPlanInputs
from compare.suites.prefill_plan.case import PrefillPlanCase


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
