"""What the implementations that run inside this process have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compare.cases.case import Case
from compare.cases.inputs import Inputs, PrefillPlanInputs, SparsePrefillInputs
from compare.cases.sparse_prefill import SparsePrefillCase
from compare.run.chunks import run_chunks
from compare.run.implementations import Unsupported
from compare.run.one_suite import OneSuite
from compare.run.result import PlanChunk, PlanResult, Result, SparsePrefillResult


class SparsePrefill(OneSuite[SparsePrefillCase]):
    """Base of sparse prefill: a subclass says what stops it here and computes one call."""

    suites = frozenset({"sparse-prefill"})
    case_type = SparsePrefillCase

    def call(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        """One call; inputs.chunks is None."""
        raise NotImplementedError

    def call_chunk(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        """One call for a chunk of a plan, which may be empty."""
        return self.call(inputs)

    def run(self, inputs: Inputs) -> SparsePrefillResult:
        if not isinstance(inputs, SparsePrefillInputs):
            raise Unsupported(f"{self.name} is for sparse-prefill")
        if inputs.chunks is not None:
            return run_chunks(self.call_chunk, inputs)
        return self.call(inputs)


class Planner:
    """A chunk planner with the signature of plan_prefill_chunks. home: imports and gives it;
    reason: why it can't run here; notes: what a report should say about it."""

    suites = frozenset({"prefill-plan"})

    def __init__(
        self,
        name: str,
        home: Callable[[], Callable[..., Any]],
        *,
        reason: Callable[[], str | None] = lambda: None,
        notes: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self.name = name
        self._home = home
        self._notes = notes
        self.unavailable = reason

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
