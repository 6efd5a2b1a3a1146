"""A planner of prefill chunks as an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compare.judging.plans import PlanChunk, PlanResult, PrefillPlanInputs
from compare.protocol.case import Case
from compare.protocol.implementation import Distribution, Unsupported
from compare.protocol.inputs import Inputs, Result


class Planner:
    """A chunk planner with the signature of plan_prefill_chunks. home: imports and gives it;
    reason: why it can't run here; notes: what a report should say about it; distribution: the
    package that it is from, None: this project's."""

    suites = frozenset({"prefill-plan"})

    def __init__(
        self,
        name: str,
        home: Callable[[], Callable[..., Any]],
        *,
        reason: Callable[[], str | None] = lambda: None,
        notes: Callable[[], tuple[str, ...]] = tuple,
        distribution: Callable[[], Distribution | None] = lambda: None,
    ) -> None:
        self.name = name
        self._home = home
        self._notes = notes
        self.unavailable = reason
        self.distribution = distribution

    def supports(self, case: Case) -> str | None:
        if case.suite not in self.suites:
            return f"{self.name} plans chunks; it isn't for {case.suite}"
        return self.unavailable()

    def run(self, inputs: Inputs) -> Result:
        if not isinstance(inputs, PrefillPlanInputs):
            raise Unsupported(f"{self.name} is for prefill-plan")
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
        chunks = tuple(
            PlanChunk(
                start=chunk.start,
                end=chunk.end,
                compressed_rows=chunk.compressed_rows,
                workspace_rows=chunk.workspace_rows,
                query_start=chunk.query_start,
                query_end=chunk.query_end,
            )
            for chunk in plan
        )
        return PlanResult(chunks=chunks, notes=self._notes())
