"""What implementations of the V4 prefill path and of its stages have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compare.cases.inputs import Inputs
from compare.cases.v4_inputs import V4PrefillInputs, V4StagesInputs
from compare.cases.v4_prefill import V4PrefillCase
from compare.cases.v4_stages import V4StagesCase
from compare.run.convert import to_numpy
from compare.run.implementations import Unsupported
from compare.run.one_suite import OneSuite
from compare.run.result import ChunkStage, PlanChunk, V4PrefillResult, V4StagesResult


class V4Prefill(OneSuite[V4PrefillCase]):
    """Base of the whole path: a subclass says what stops it here and computes one batch."""

    suites = frozenset({"v4-prefill"})
    case_type = V4PrefillCase

    def call(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        """One batch."""
        raise NotImplementedError

    def run(self, inputs: Inputs) -> V4PrefillResult:
        if not isinstance(inputs, V4PrefillInputs):
            raise Unsupported(f"{self.name} is for v4-prefill")
        return self.call(inputs)


class V4Stages(OneSuite[V4StagesCase]):
    """Base of single stages: a subclass computes each by its name."""

    suites = frozenset({"v4-stages"})
    case_type = V4StagesCase

    def call(self, stage: str, arguments: dict[str, Any]) -> V4StagesResult:
        """One stage."""
        raise NotImplementedError

    def run(self, inputs: Inputs) -> V4StagesResult:
        if not isinstance(inputs, V4StagesInputs):
            raise Unsupported(f"{self.name} is for v4-stages")
        return self.call(inputs.stage, dict(inputs.arguments))


def plan_chunks(plan: Iterable[Any]) -> tuple[PlanChunk, ...]:
    """Chunks of any house as the judge's."""
    return tuple(
        PlanChunk(
            start=int(chunk.start),
            end=int(chunk.end),
            compressed_rows=int(chunk.compressed_rows),
            workspace_rows=int(chunk.workspace_rows),
            query_start=int(chunk.query_start),
            query_end=int(chunk.query_end),
        )
        for chunk in plan
    )


def chunk_stages(stages: Iterable[Any] | None) -> tuple[ChunkStage, ...] | None:
    """Stages of any house as the judge's; arrays of any framework."""
    if stages is None:
        return None
    return tuple(
        ChunkStage(
            workspace=to_numpy(stage.workspace, "workspace"),
            indices=to_numpy(stage.indices, "indices"),
            lengths=to_numpy(stage.lengths, "lengths"),
        )
        for stage in stages
    )
