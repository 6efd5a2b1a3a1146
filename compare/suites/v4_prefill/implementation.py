"""What implementations of the V4 prefill path have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compare.protocol.arrays import to_numpy
from compare.protocol.one_suite import OneSuite
from compare.suites.v4_prefill.call import ChunkStage, V4PrefillInputs
from compare.suites.v4_prefill.case import V4PrefillCase


class V4Prefill(OneSuite[V4PrefillCase, V4PrefillInputs]):
    """Base of the whole path."""

    case_type = V4PrefillCase
    inputs_type = V4PrefillInputs


def chunk_stages(stages: Iterable[Any] | None) -> tuple[ChunkStage, ...] | None:
    """The stages of any implementation as the judge's; arrays of any framework."""
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
