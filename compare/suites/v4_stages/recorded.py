"""Recorded calls of single stages of the V4 prefill path.

Unlike all other recorded results, those that come from an engine hold their inputs too: the case
line has only their number. In a case's file the arguments are called ``in.NAME`` and the results
``out.NAME``. Arrays of int32 stand as int16 where that holds them. Of a gather's workspace, which
is mostly as it was before, ``out.values`` [R, 512] are the rows ``out.rows`` (of [n * M]) that
changed; where all rows before were equal, ``in.workspace`` is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compare.goldens.files import known_folder, read_entry
from compare.goldens.format import DamagedGolden, UnknownGolden, read_manifest
from compare.protocol.inputs import Inputs, Result
from compare.protocol.records import Incomplete, Records, Stored
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.case import V4StagesCase

_SHAPE = "workspace_shape"


class V4StagesRecords(Records):
    """A stage's arrays, and its inputs where the case line is the number of a recorded call."""

    largest_folder = 1_000_000
    ending = "_stages"

    def keep(self, inputs: Inputs, result: Result) -> Stored:
        assert isinstance(inputs, V4StagesInputs) and isinstance(result, V4StagesResult)
        case = inputs.case
        recorded = isinstance(case, V4StagesCase) and case.recorded
        return stored_call(inputs, result, with_inputs=recorded)

    def restore(self, inputs: Inputs, stored: Stored, notes: tuple[str, ...]) -> V4StagesResult:
        assert isinstance(inputs, V4StagesInputs)
        arrays = {
            name.partition(".")[2]: _widened(array)
            for name, array in stored.tensors.items()
            if name.startswith("out.")
        }
        if arrays.keys() & {"rows", "values"}:
            before = inputs.arguments.get("workspace")
            if not isinstance(before, np.ndarray) or arrays.keys() != {"rows", "values"}:
                raise Incomplete("a gather has out.rows and out.values, and a workspace before it")
            workspace = before.copy()
            workspace.reshape(-1, before.shape[-1])[arrays["rows"]] = arrays["values"]
            arrays = {"workspace": workspace}
        return V4StagesResult(arrays=arrays, notes=notes)

    def source(self, build: Mapping[str, str], place: str) -> str:
        return f"{build['name']} {build['version']}, its own stage functions run on {place}"


def recorded_inputs(name: str, case: V4StagesCase) -> V4StagesInputs:
    """The arguments of a recorded call. name: DEVICE/KERNEL. UnknownGolden where there is no such
    call, DamagedGolden where a hash differs.
    """
    try:
        folder = known_folder(name)
    except UnknownGolden as error:
        raise UnknownGolden(f"{case}: {error}") from None
    manifest = read_manifest(folder)
    entry = manifest.entry(str(case))
    if entry is None:
        same = sum(e.facts.get("stage") == case.stage for e in manifest.entries)
        raise UnknownGolden(f"{case}: {name} holds {same} calls of stage={case.stage}")
    tensors = read_entry(folder, entry)
    numbers = dict(entry.facts["numbers"])
    shape = numbers.pop(_SHAPE, None)
    given: dict[str, Any] = dict(numbers)
    for stored, array in tensors.items():
        side, _, argument = stored.partition(".")
        if side == "in":
            given[argument] = _widened(array)
    if shape is not None:
        whole = tuple(map(int, str(shape).split("x")))
        given["workspace"] = np.broadcast_to(given["workspace"], whole).copy()
    inputs = V4StagesInputs(stage=case.stage, arguments=given, case=case)
    if inputs.sha256() != entry.input_sha256:
        raise DamagedGolden(
            f"{folder / str(entry.file)} is damaged: its inputs have SHA-256 "
            f"{inputs.sha256()[:12]} where the manifest says {str(entry.input_sha256)[:12]}"
        )
    return inputs


def stored_call(inputs: V4StagesInputs, result: V4StagesResult, *, with_inputs: bool) -> Stored:
    """What is kept of a call, with or without its inputs."""
    tensors = {f"out.{name}": _narrowed(array) for name, array in result.arrays.items()}
    numbers: dict[str, int | str | None] = {}
    facts = {"stage": inputs.stage, "numbers": numbers}
    before = inputs.arguments.get("workspace")
    if isinstance(before, np.ndarray):
        after = tensors.pop("out.workspace")
        tensors |= _changed(before, after)
    if not with_inputs:
        return Stored(tensors=tensors, facts=facts)
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
    return Stored(tensors=tensors, facts=facts, holds_inputs=True)


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
