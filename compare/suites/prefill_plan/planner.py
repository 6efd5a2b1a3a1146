"""A planner of prefill chunks as an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compare.judging.plans import PlanResult, PrefillPlanInputs, plan_chunks
from compare.protocol.implementation import Distribution, Unsupported
from compare.protocol.one_suite import OneSuite
from compare.suites.prefill_plan.case import PrefillPlanCase


class Planner(OneSuite[PrefillPlanCase, PrefillPlanInputs]):
    """A chunk planner with the signature of plan_prefill_chunks. home: imports and gives it;
    reason: why it can't run here; notes: what a report should say about it; distribution: the
    package that it is from, None: this project's."""

    case_type = PrefillPlanCase
    inputs_type = PrefillPlanInputs
    does = "plans chunks"

    def __init__(
        self,
        name: str,
        home: Callable[[], Callable[..., Any]],
        *,
        reason: Callable[[], str | None] = lambda: None,
        notes: Callable[[], tuple[str, ...]] = tuple,
        distribution: Callable[[], Distribution | None] = lambda: None,
    ) -> None:
        super().__init__(name)
        self._home = home
        self._notes = notes
        self.unavailable = reason
        self.distribution = distribution

    def call(self, inputs: PrefillPlanInputs) -> PlanResult:
        if reason := self.unavailable():
            raise Unsupported(reason)
        plan = self._home()(
            inputs.seq_lens,
            inputs.query_lens,
            compress_ratio=inputs.compress_ratio,
            window=inputs.window,
            max_model_len=inputs.max_model_len,
            max_num_batched_tokens=inputs.max_num_batched_tokens,
            chunk_size=inputs.chunk_size,
            has_compressed=inputs.has_compressed,
        )
        return PlanResult(chunks=plan_chunks(plan, self.name), notes=self._notes())
