"""Recorded calls of single stages of the V4 prefill path.

Unlike all other recorded results, those that come from an engine hold their inputs too: the case
line has only their number. In a case's file the arguments are called ``in.NAME`` and the results
``out.NAME``. Arrays of int32 stand as int16 where that holds them. Of a gather's workspace, which
is mostly as it was before, ``out.values`` [R, 512] are the rows ``out.rows`` (of [n * M]) that
changed; where all rows before were equal, ``in.workspace`` is one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from compare.goldens.files import read_entry
from compare.goldens.format import (
    DamagedGolden,
    StagesEntry,
    UnknownGolden,
    find_golden,
    read_manifest,
)
from compare.protocol.inputs import Inputs
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.case import V4StagesCase

_SHAPE = "workspace_shape"


def recorded_inputs(name: str, case: V4StagesCase) -> V4StagesInputs:
    """The arguments of a recorded call. name: DEVICE/KERNEL. UnknownGolden where there is no such
    call, DamagedGolden where a hash differs.
    """
    folder = find_golden(name)
    if folder is None:
        raise UnknownGolden(f"{case}: there are no recorded results {name}")
    manifest = read_manifest(folder)
    entry = manifest.entry(str(case))
    if entry is None:
        same = sum(getattr(e, "stage", None) == case.stage for e in manifest.entries)
        raise UnknownGolden(f"{case}: {name} holds {same} calls of stage={case.stage}")
    assert isinstance(entry, StagesEntry)
    tensors = read_entry(folder, entry)
    numbers = dict(entry.numbers)
    shape = numbers.pop(_SHAPE, None)
    given: dict[str, Any] = dict(numbers)
    for stored, array in tensors.items():
        side, _, argument = stored.partition(".")
        if side == "in":
            given[argument] = _widened(array)
    if shape is not None:
        whole = tuple(map(int, str(shape).split("x")))
        given["workspace"] = np.broadcast_to(given["workspace"], whole).copy()
    inputs = V4StagesInputs(stage=entry.stage, arguments=given, case=case)
    if inputs.sha256() != entry.input_sha256:
        raise DamagedGolden(
            f"{folder / entry.file} is damaged: its inputs have SHA-256 {inputs.sha256()[:12]} "
            f"where the manifest says {entry.input_sha256[:12]}"
        )
    return inputs


def recorded_result(
    folder: Path, entry: StagesEntry, inputs: Inputs, notes: tuple[str, ...]
) -> V4StagesResult:
    """The recorded result of `inputs`, which are those of the entry. DamagedGolden where a hash
    differs."""
    assert isinstance(inputs, V4StagesInputs)
    stored = read_entry(folder, entry)
    found = {n.partition(".")[2]: _widened(a) for n, a in stored.items() if n.startswith("out.")}
    if "values" in found:
        before = inputs.arguments["workspace"]
        assert isinstance(before, np.ndarray)
        workspace = before.copy()
        workspace.reshape(-1, before.shape[-1])[found.pop("rows")] = found.pop("values")
        found["workspace"] = workspace
    return V4StagesResult(arrays=found, notes=notes)


def stored_call(
    inputs: V4StagesInputs, result: V4StagesResult, *, with_inputs: bool
) -> tuple[dict[str, np.ndarray], dict[str, int | str | None]]:
    """The tensors of a call's file, and the numbers of its entry."""
    tensors = {f"out.{name}": _narrowed(array) for name, array in result.arrays.items()}
    numbers: dict[str, int | str | None] = {}
    before = inputs.arguments.get("workspace")
    if isinstance(before, np.ndarray):
        after = tensors.pop("out.workspace")
        tensors |= _changed(before, after)
    if not with_inputs:
        return tensors, numbers
    for name, value in inputs.arguments.items():
        if isinstance(value, np.ndarray):
            tensors[f"in.{name}"] = _narrowed(value)
        else:
            numbers[name] = value
    if isinstance(before, np.ndarray) and before.size:
        bits = before.view(np.uint16).reshape(-1, before.shape[-1])
        if (bits == bits[0]).all():
            tensors["in.workspace"] = before.reshape(-1, before.shape[-1])[:1]
            numbers[_SHAPE] = "x".join(map(str, before.shape))
    return tensors, numbers


def _changed(before: np.ndarray, after: np.ndarray) -> dict[str, np.ndarray]:
    width = before.shape[-1]
    bits = [array.view(np.uint16).reshape(-1, width) for array in (before, after)]
    rows = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    return {
        "out.rows": rows.astype(np.int32),
        "out.values": after.reshape(-1, width)[rows],
    }


def _narrowed(array: np.ndarray) -> np.ndarray:
    if array.dtype != np.int32:
        return array
    narrow = array.astype(np.int16)
    return narrow if (narrow == array).all() else array


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32) if array.dtype == np.int16 else array
