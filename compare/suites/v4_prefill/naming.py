"""Which known fault a wrong stage of the V4 prefill path shows: exact arithmetic on whole numbers
and bits, no attention.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Int64

from compare.judging.device import to_numpy
from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, possible_faults
from compare.judging.plans import PlanChunk
from compare.suites.v4_prefill.call import ChunkStage
from compare.suites.v4_prefill.evidence import V4Witness
from compare.suites.v4_prefill.faults import FAULTS

_MOST = 24
"""How many wrong tokens or rows, and as many right ones, have to agree with a fault."""


def name_of_indices(
    evidence: Evidence[V4Witness],
    plan: tuple[PlanChunk, ...],
    stages: tuple[ChunkStage, ...],
    wrong: Int64[np.ndarray, " n"],
) -> tuple[str, str] | None:
    """(slug, sentence) of the fault that gives every token of a sample the keys that the candidate
    gives it; None where there is none such. wrong: the tokens with wrong keys.
    """
    from torch_ref.v4.variants import RIGHT, workspace_rows

    tokens = _sample(wrong, evidence.num_tokens)

    def agrees(fault: Fault) -> bool:
        changed = False
        for token in tokens:
            k = next(k for k, c in enumerate(plan) if c.query_start <= token < c.query_end)
            chunk, stage = plan[k], stages[k]
            size = (chunk.end - chunk.start) * chunk.workspace_rows
            row = token - chunk.query_start
            got = stage.indices[row, : max(int(stage.lengths[row]), 0)].astype(np.int64)
            rows, right = (
                workspace_rows(evidence.witness.arguments, variant, chunk, token).numpy()
                for variant in (fault.variant, RIGHT)
            )
            if not np.array_equal(_keys(got, size), _keys(rows, size)):
                return False
            changed |= not np.array_equal(_keys(rows, size), _keys(right, size))
            # The same keys, and slots that name none counted with them.
            changed |= len(got) == len(rows) != len(right)
        return changed

    return _named(
        fault
        for fault in possible_faults(FAULTS, evidence.inputs)
        if fault.stage == "indices" and fault.variant.possible("workspace") and agrees(fault)
    )


def name_of_gather(
    evidence: Evidence[V4Witness],
    chunk: PlanChunk,
    stage: ChunkStage,
    wrong: Int64[np.ndarray, " n"],
) -> tuple[str, str] | None:
    """(slug, sentence) of the fault that puts the candidate's bits into every sampled row of a
    chunk's workspace, apart from what is NaN after it; None where there is none such. wrong: the
    rows with wrong bits.
    """
    from torch_ref.v4.misreading import read_keys
    from torch_ref.v4.variants import gathered_keys, keys_of_rows

    gathered = np.flatnonzero(evidence.witness.flat.of_chunk(chunk) >= 0)
    rows = gathered[_sample(np.searchsorted(gathered, wrong), len(gathered))]
    got = _bits(stage.workspace.reshape(-1, stage.workspace.shape[-1])[rows])
    right = _bits(evidence.witness.call.kv[evidence.witness.flat.of_chunk(chunk)[rows]])
    keys = keys_of_rows(evidence.witness.arguments, chunk, torch.from_numpy(rows))

    def agrees(fault: Fault) -> bool:
        read = gathered_keys(evidence.witness.arguments, fault.variant, keys, chunk)
        held = _bits(
            to_numpy(read_keys(evidence.witness.arguments, read, fault.variant.reading)[0])
        )
        told = (held & 0x7FFF) <= 0x7F80
        return bool((held == got)[told].all() and ((held != right) & told).any())

    return _named(
        fault
        for fault in possible_faults(FAULTS, evidence.inputs)
        if fault.stage == "gather" and agrees(fault)
    )


def _named(faults: Iterable[Fault]) -> tuple[str, str] | None:
    """The first of the faults; its sentence says which others do as well."""
    fits = list(faults)
    if not fits:
        return None
    rivals = sorted({fault.name for fault in fits} - {fits[0].name})
    either = f" (or {', '.join(rivals)}: these inputs can't tell)" if rivals else ""
    return fits[0].name, fits[0].words + either


def _sample(wrong: Int64[np.ndarray, " n"], count: int) -> list[int]:
    """Some of the wrong ones and some of all, ascending."""
    spread = np.linspace(0, max(count - 1, 0), min(count, _MOST)).astype(np.int64)
    some = wrong[np.linspace(0, len(wrong) - 1, min(len(wrong), _MOST)).astype(np.int64)]
    return np.union1d(some, spread).tolist()


def _keys(rows: Int64[np.ndarray, " k"], size: int) -> Int64[np.ndarray, " m"]:
    """Those rows that are in the workspace, ascending: the kernel takes others for no key."""
    return np.sort(rows[(rows >= 0) & (rows < size)])


def _bits(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint16)
