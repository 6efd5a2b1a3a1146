"""The rows of a decode batch under the rules that vLLM ships and under the fixed ones, judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from compare.judging.plans import (
    DISAGREE,
    FIXED,
    FIXED_AGAIN,
    SHIPPED,
    DecodePlanInputs,
    DecodePlanResult,
)
from compare.suites.decode_plan.case import DecodePlanCase
from compare.suites.decode_plan.judge import explain, harmless
from compare.suites.decode_plan.make import decode_plan_inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedRows:
    """Both plans of one batch. counts: of each rank, each row's keys there. shipped is None where
    the shipped rules raise: shipped_wrong then says it, or notes where they refuse the batch.
    notes: differences that do no harm.
    """

    case: DecodePlanCase
    inputs: DecodePlanInputs
    ranks: tuple[int, ...]
    shipped: DecodePlanResult | None
    fixed: DecodePlanResult
    shipped_counts: tuple[tuple[int, ...], ...]
    fixed_counts: tuple[tuple[int, ...], ...]
    shipped_wrong: tuple[str, ...]
    fixed_wrong: tuple[str, ...]
    notes: tuple[str, ...]


def explain_plans(
    case: DecodePlanCase,
    ranks: tuple[int, ...],
    planned: Callable[[str, DecodePlanInputs], Any],
) -> ExplainedRows:
    """Both plans of a batch, judged on these ranks; planned: the plan by the planner of a name,
    ValueError where the planner refuses the batch."""
    by_rank = [decode_plan_inputs(dataclasses.replace(case, rank=rank)) for rank in ranks]
    fixed = [planned(FIXED, inputs) for inputs in by_rank]
    again = [planned(FIXED_AGAIN, inputs) for inputs in by_rank]
    fixed_wrong = [
        said for i, plan in zip(by_rank, fixed, strict=True) for said in explain(i, plan)
    ]
    if any(_differ(a, b) for a, b in zip(fixed, again, strict=True)):
        fixed_wrong.append(DISAGREE)

    shipped, shipped_wrong, notes = [], [], []
    if case.world == 1 and case.causal and case.promised > 1:
        shipped = fixed
        notes.append(
            f"with one rank {SHIPPED} gives the kernel the batch as it is, ragged or not, and the "
            "kernel's own causal bounds are right"
        )
    else:
        try:
            shipped = [planned(SHIPPED, inputs) for inputs in by_rank]
        except ValueError as error:
            from torch_ref.planning import BoundsShapeMismatch, NonUniformBlock

            match error.__cause__ or error:
                case NonUniformBlock():
                    notes.append(f"{SHIPPED} refuses the batch, and nothing goes wrong: {error}")
                case BoundsShapeMismatch(rows=rows, bounds=requests) if case.world == 1:
                    shipped_wrong = [
                        f"lengths and block table of {_plural(requests, 'request')} for "
                        f"{_plural(rows, 'row')} of one token: the tokens don't divide by "
                        "the requests, so every token becomes a row of its own, and they stay one "
                        "per request"
                    ]
                case _:
                    shipped_wrong = [str(error)]
    for inputs, plan in zip(by_rank, shipped, strict=False):
        said = explain(inputs, plan)
        if said and harmless(inputs, plan):
            each = len(plan.bound) // len(case.lens)
            notes.append(
                f"{SHIPPED} views the batch as [{len(case.lens)}, {each}]: the same rows as one "
                "per token"
            )
        else:
            shipped_wrong += said
    return ExplainedRows(
        case=case,
        inputs=by_rank[0],
        ranks=ranks,
        shipped=shipped[0] if shipped else None,
        fixed=fixed[0],
        shipped_counts=tuple(plan.local_counts for plan in shipped),
        fixed_counts=tuple(plan.local_counts for plan in fixed),
        shipped_wrong=tuple(dict.fromkeys(shipped_wrong)),
        fixed_wrong=tuple(dict.fromkeys(fixed_wrong)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _differ(a: DecodePlanResult, b: DecodePlanResult) -> bool:
    """Apart from what padded rows name as their request and bound."""

    def facts(plan: DecodePlanResult) -> tuple:
        rows = zip(plan.request, plan.bound, plan.padding, strict=True)
        return (
            plan.ragged,
            tuple(None if padding else (request, bound) for request, bound, padding in rows),
            plan.local_counts,
        )

    return facts(a) != facts(b)


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word if count == 1 else word + 's'}"
