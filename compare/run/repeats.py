"""A candidate run several times on the same inputs: are its results the same, bit for bit?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from compare.isolation.worker import Isolated
from compare.protocol.implementation import Implementation, warm_up
from compare.protocol.inputs import Inputs, Result

_BLOCK_ROWS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """The first result, the seconds of its call, the longest call of all, and what differed from
    the first one in a sentence (None: nothing)."""

    result: Result
    seconds: float
    longest: float
    difference: str | None = None


def run_repeatedly(implementation: Implementation, inputs: Inputs, times: int) -> Ran:
    """Runs it `times` times and compares every later result with the first."""
    first, seconds = timed(implementation, inputs)
    if times > 1 and not isinstance(implementation, Isolated):
        first = _kept(first)
    longest, different, worst = seconds, [], ""
    for number in range(2, times + 1):
        again, took = timed(implementation, inputs)
        longest = max(longest, took)
        change = difference(first, again)
        if change is not None:
            different.append(number)
            worst = worst or f"run {number}: {change}"
    said = None
    if different:
        said = f"{len(different)} of {times - 1} repeats differ from the first run; {worst}"
    return Ran(result=first, seconds=seconds, longest=longest, difference=said)


def _kept(result: Result) -> Result:
    """A copy: a function may give back one buffer again and again, and write to it each time."""

    def copy(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, Mapping):
            return {name: copy(item) for name, item in value.items()}
        return value

    values = {f.name: copy(getattr(result, f.name)) for f in dataclasses.fields(result)}
    return dataclasses.replace(result, **values)


def timed(implementation: Implementation, inputs: Inputs) -> tuple[Result, float]:
    """One result and the seconds of its call: a worker takes the time over there."""
    if isinstance(implementation, Isolated):
        return implementation.run_timed(inputs)
    warm_up(implementation)
    started = time.perf_counter()
    result = implementation.run(inputs)
    return result, time.perf_counter() - started


def difference(first: Result, other: Result) -> str | None:
    """None for the same bits, else how many elements of which tensor differ and where first."""
    a, b = _arrays(first), _arrays(other)
    if not a and not b:  # a plan, of whole numbers
        return None if first == other else "another plan"
    said = [_array_difference(name, a.get(name), b.get(name)) for name in a | b]
    return "; ".join(change for change in said if change is not None) or None


def _arrays(result: Result) -> dict[str, np.ndarray]:
    """The tensors of a result by name."""
    by_name: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        for name, array in (value if isinstance(value, Mapping) else {field.name: value}).items():
            if isinstance(array, np.ndarray):
                by_name[name] = array
    return by_name


def _array_difference(name: str, a: np.ndarray | None, b: np.ndarray | None) -> str | None:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return f"{name} has another shape or dtype"
    count, first = 0, None
    for start in range(0, len(a), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        unequal = _bits(a[block]) != _bits(b[block])
        count += int(unequal.sum())
        if first is None and unequal.any():
            place = np.argwhere(unequal)[0]
            first = [start + int(place[0]), *map(int, place[1:])]
    if first is None:
        return None
    return f"{count:,} of {a.size:,} elements of {name} differ, the first at {first}"


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")
