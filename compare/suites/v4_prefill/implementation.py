"""What implementations of the V4 prefill path have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compare.protocol.arrays import to_numpy
from compare.protocol.implementation import Unsupported
from compare.protocol.inputs import Inputs
from compare.protocol.one_suite import OneSuite
from compare.suites.v4_prefill.call import ChunkStage, V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.case import V4PrefillCase


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
