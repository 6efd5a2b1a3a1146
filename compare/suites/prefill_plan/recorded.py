"""Recorded plans: the rows (start, end, N, M) of their chunks, requests [start, end) with N
compressed rows of M, in the manifest alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

from compare.judging.plans import PlanChunk, PlanResult, PrefillPlanInputs
from compare.protocol.inputs import Inputs, Result
from compare.protocol.records import Incomplete, Records, Stored
from compare.protocol.verdict import Verdict


class PrefillPlanRecords(Records):
    """A plan is four numbers a chunk; its tokens follow from the batch."""

    largest_folder = 1_000_000

    def keep(self, inputs: Inputs, result: Result) -> Stored:
        assert isinstance(result, PlanResult)
        rows = [[c.start, c.end, c.compressed_rows, c.workspace_rows] for c in result.chunks]
        return Stored(tensors={}, facts={"plan": rows})

    def restore(self, inputs: Inputs, stored: Stored, notes: tuple[str, ...]) -> PlanResult:
        assert isinstance(inputs, PrefillPlanInputs)
        if "plan" not in stored.facts:
            raise Incomplete("a result has plan")
        first = list(accumulate(inputs.query_lens, initial=0))
        chunks = tuple(
            PlanChunk(
                start=start,
                end=end,
                compressed_rows=compressed,
                workspace_rows=rows,
                query_start=first[start],
                query_end=first[end],
            )
            for start, end, compressed, rows in stored.facts["plan"]
        )
        return PlanResult(chunks=chunks, notes=notes)

    def refusal(self, judge: Callable[..., Verdict], inputs: Inputs, result: Result) -> str | None:
        """A plan by the rules that vLLM 0.33.0 ships may be compared with, its empty chunks too."""
        failed = judge(inputs, result, result).reference_failed
        return None if failed is None else f"the judge says: {failed}"

    def source(self, build: Mapping[str, str], place: str) -> str:
        return f"{build['name']} {build['version']}, its own planner run on {place}"
