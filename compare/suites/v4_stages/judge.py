"""The judge of single stages of the V4 prefill path: whole numbers and bits, so all of them must be
the very ones that are due. The first difference is named with its place and both values.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Bool

from compare.judging.tolerance import check_profile
from compare.protocol.verdict import Diagnosis, Status, Verdict, Worst
from compare.suites.v4_stages import quantise
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.faults import fault_of
from compare.suites.v4_stages.rules import gathered_places, right_arrays, token_places

__all__ = ["judge"]


def judge(
    inputs: V4StagesInputs,
    candidate: V4StagesResult,
    reference: V4StagesResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: object = None,
) -> Verdict:
    """What is to be said about what a stage gave back.

    Lists: every element of every array. gather: the bits of every row, those that are written (any
    NaN for a NaN) and those that must stay as they were. A known fault is named where it gives the
    very arrays that were found.

    profile and evidence are those of the other suites and change nothing here. ValueError: an
    unknown profile, or arguments that name a place that isn't there.
    """
    check_profile(profile)
    due = right_arrays(inputs)
    failed = None
    if reference is not None:
        said = _judge(inputs, due, reference)
        failed = said.reason if said.status.failed else None
    verdict = _judge(inputs, due, candidate)
    notes = [*candidate.notes]
    if reference is not None:
        notes += [f"reference: {note}" for note in reference.notes]
    return Verdict(
        status=verdict.status,
        reason=verdict.reason,
        diagnosis=verdict.diagnosis,
        worst=verdict.worst,
        reference_failed=failed,
        notes=tuple(notes),
    )


def _judge(inputs: V4StagesInputs, due: dict[str, np.ndarray], result: V4StagesResult) -> Verdict:
    if fault := _form(due, result):
        return fault
    if inputs.stage == "quantise":
        due = quantise.accepted(inputs.arguments, result.arrays["cache"])
    reasons, diagnosis, worst = [], [], []
    for name, expected in due.items():
        got = result.arrays[name]
        wrong = _differences(got, expected, written=_written(inputs, expected))
        if not wrong.any():
            continue
        place = tuple(map(int, np.argwhere(wrong)[0]))
        sentence = (
            f"{inputs.stage}: {name}[{', '.join(map(str, place))}] is {got[place]:g}; "
            f"{_expected(inputs, name, place, expected)} ({_count(wrong)})"
        )
        reasons.append(sentence)
        known, more = _known(inputs, name, got, expected, wrong, place)
        diagnosis.append(Diagnosis(name=known, sentence=sentence + more))
        worst.append(
            Worst(
                tensor=name,
                index=place,
                got=float(got[place]),
                expected=float(expected[place]),
                share=math.inf,
            )
        )
    if reasons and (fault := fault_of(inputs, result)):
        diagnosis = [Diagnosis(name=fault.name, sentence=f"{inputs.stage}: {fault.sentence}")]
    return Verdict(
        status=Status.NUMERIC if reasons else Status.PASS,
        reason="; ".join(reasons),
        diagnosis=tuple(diagnosis),
        worst=tuple(worst),
    )


def _form(due: dict[str, np.ndarray], result: V4StagesResult) -> Verdict | None:
    """Names first, then shapes, then dtypes."""
    if missing := due.keys() - result.arrays.keys():
        reason = f"{sorted(missing)[0]} is missing; {', '.join(due)} are due"
        return Verdict(status=Status.SHAPE, reason=reason)
    for name, expected in due.items():
        got = result.arrays[name].shape
        if got != expected.shape:
            reason = f"{name} has the shape {list(got)}; {list(expected.shape)} is due"
            return Verdict(status=Status.SHAPE, reason=reason)
    for name, expected in due.items():
        dtype = result.arrays[name].dtype
        if dtype != expected.dtype:
            reason = f"{name} is {dtype.name}; {expected.dtype.name} is due"
            return Verdict(status=Status.DTYPE, reason=reason)
    return None


def _written(inputs: V4StagesInputs, expected: np.ndarray) -> Bool[np.ndarray, "n M"] | None:
    """Which rows a gather writes; None of another stage."""
    if inputs.stage != "gather":
        return None
    written = np.zeros(expected.shape[:2], bool)
    for request in range(len(expected)):
        written[request, gathered_places(inputs.arguments, request)[0]] = True
    return written


def _differences(
    got: np.ndarray, expected: np.ndarray, written: Bool[np.ndarray, "n M"] | None
) -> Bool[np.ndarray, "..."]:
    if written is None:
        if got.dtype == ml_dtypes.bfloat16:
            return got.view(np.uint16) != expected.view(np.uint16)
        return got != expected
    bits = [np.ascontiguousarray(array).view(np.uint16) for array in (got, expected)]
    both_nan = np.logical_and(*((b & 0x7FFF) > 0x7F80 for b in bits))
    return (bits[0] != bits[1]) & ~(both_nan & written[..., None])


def _expected(
    inputs: V4StagesInputs, name: str, place: tuple[int, ...], expected: np.ndarray
) -> str:
    """The value that is due at a place, and why there."""
    value, given = f"{expected[place]:g}", inputs.arguments
    if inputs.stage == "gather":
        request, row = place[:2]
        rows, position = gathered_places(given, request)
        at = np.flatnonzero(rows == row)
        if not len(at):
            return f"{value} stood there and must stay, nothing is gathered to this row"
        return f"{value} is due, of token {position[at[0]]} of request {request}"
    if inputs.stage == "quantise":
        token = _written_token(inputs, place, expected)
        return (
            f"{value} stood there and must stay"
            if token < 0
            else (f"{value} is due, of token {token}")
        )
    if inputs.stage != "global_topk":
        places = token_places(given)
        if place[0] >= len(places[0]):
            return f"{value} is due behind the tokens of the batch"
        request, position = (int(array[place[0]]) for array in places)
        mapped = given.get("slot_mapping")
        padding = "" if mapped is None or _array(mapped)[place[0]] >= 0 else ", a token of padding"
        return f"{value} is due for request {request}, position {position}{padding}"
    request = int(_array(given["token_to_request"])[place[0]])
    padding = "" if _array(given["is_valid_token"])[place[0]] else ", a token of padding"
    return f"{value} is due for request {request}{padding}"


def _known(
    inputs: V4StagesInputs,
    name: str,
    got: np.ndarray,
    expected: np.ndarray,
    wrong: np.ndarray,
    place: tuple[int, ...],
) -> tuple[str, str]:
    """A slug, and words on what all differences have in common, if they have."""
    if inputs.stage == "gather":
        rows = _written(inputs, expected)
        assert rows is not None
        if not rows[place[:2]]:
            return "touched-rows", ""
        other = [
            token
            for token in np.argwhere(rows)
            if (_same(expected[tuple(token)], got[place[:2]])).all()
        ]
        if not other:
            return "wrong-rows", ""
        request, row = (int(x) for x in other[0])
        places, positions = gathered_places(inputs.arguments, request)
        position = positions[np.flatnonzero(places == row)[0]]
        return "wrong-rows", f"; the row holds token {position} of request {request}"
    if inputs.stage == "quantise":
        there = _written_token(inputs, place, expected) >= 0
        return "wrong-bytes" if there else "touched-bytes", ""
    apart = np.unique((got.astype(np.int64) - expected)[wrong])
    if len(apart) != 1:
        return f"wrong-{name}", ""
    by = int(apart[0])
    size = "large" if by > 0 else "small"
    which = [
        f" = {symbol}"
        for symbol, argument in (("M", "workspace_rows"), ("N", "compressed_rows"))
        if inputs.stage == "combine" and inputs.arguments[argument] == abs(by)
    ]
    return f"wrong-{name}", f"; each that differs is {abs(by)}{''.join(which)} too {size}"


def _written_token(inputs: V4StagesInputs, place: tuple[int, ...], cache: np.ndarray) -> int:
    """The token that is written at a place of a cache, or -1."""
    marks = quantise.token_of_each_byte(inputs.arguments).reshape(*cache.shape, cache.itemsize)
    return int(marks[(*place, 0)])


def _same(mine: np.ndarray, theirs: np.ndarray) -> Bool[np.ndarray, " D"]:
    return mine.view(np.uint16) == theirs.view(np.uint16)


def _count(wrong: Bool[np.ndarray, "..."]) -> str:
    if wrong.ndim == 1:
        return f"{np.count_nonzero(wrong)} of {wrong.size} elements differ"
    rows = wrong.reshape(-1, wrong.shape[-1]).any(axis=1)
    return f"{np.count_nonzero(rows)} of {len(rows)} rows differ"


def _array(value: Any) -> np.ndarray:
    assert isinstance(value, np.ndarray)
    return value
