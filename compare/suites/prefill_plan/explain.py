"""The chunks of a batch under the rules that vLLM ships and under the fixed ones, judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from compare.judging.plans import (
    DISAGREE,
    FIXED,
    FIXED_AGAIN,
    SHIPPED,
    PlanResult,
    PrefillPlanInputs,
)
from compare.suites.prefill_plan.case import PrefillPlanCase
from compare.suites.prefill_plan.judge import explain


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedPlans:
    """Both plans of one batch, and in sentences which rules they break. case: the same batch as a
    case line."""

    case: str
    inputs: PrefillPlanInputs
    shipped: PlanResult
    fixed: PlanResult
    shipped_wrong: tuple[str, ...]
    fixed_wrong: tuple[str, ...]


def explain_plans(
    inputs: PrefillPlanInputs, planned: Callable[[str, PrefillPlanInputs], Any]
) -> ExplainedPlans:
    """Both plans of a batch; planned: the plan by the planner of a name."""
    shipped, fixed, again = (planned(name, inputs) for name in (SHIPPED, FIXED, FIXED_AGAIN))
    fixed_wrong = explain(inputs, fixed)
    if fixed.chunks != getattr(again, "chunks", None):
        fixed_wrong.append(DISAGREE)
    return ExplainedPlans(
        case=_case_line(inputs),
        inputs=inputs,
        shipped=shipped,
        fixed=fixed,
        shipped_wrong=tuple(explain(inputs, shipped)),
        fixed_wrong=tuple(fixed_wrong),
    )


def _case_line(inputs: PrefillPlanInputs) -> str:
    case = PrefillPlanCase(
        seq=inputs.seq_lens,
        q=inputs.query_lens,
        ratio=inputs.compress_ratio,
        window=inputs.window,
        max_len=inputs.max_model_len,
        max_tokens=inputs.max_num_batched_tokens,
        chunk=inputs.chunk_size,
        compressed=inputs.has_compressed,
    )
    return str(case)
