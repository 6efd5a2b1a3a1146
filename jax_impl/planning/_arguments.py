"""Checks of planner arguments: exact Python integers out, or a ValueError that names the argument.

Prefill planners multiply row counts, and compute in Python integers, which neither wrap nor
round. Those of decode work on arrays of 64-bit integers, and what their arithmetic could not hold
is refused here: lengths and positions past int64; rows, world and interleave past int32.
Nothing is converted here that isn't an integer already: a float length or a boolean mask in the
place of lengths is a caller's mistake, not a value to truncate.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

Lengths = Sequence[int] | Integer[Any, " B"]
"""One length per request, in tokens: a sequence of integers or an integer array of rank 1."""

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

_ACCEPTED_LENGTHS = "one integer >= 0 per request (a sequence, or an integer array of rank 1)"


def lengths(name: str, values: Lengths, *, most: int | None = None) -> tuple[int, ...]:
    """`values` as exact integers, all from 0 to `most`; ValueError naming `name` otherwise."""
    if isinstance(values, (list, tuple, range)):
        checked = tuple(_element(name, i, v) for i, v in enumerate(values))
    else:
        array = np.asarray(values)
        if array.dtype.kind not in "iu":
            raise ValueError(f"{name}: dtype {array.dtype}; accepted: {_ACCEPTED_LENGTHS}")
        if array.ndim != 1:
            raise ValueError(f"{name}: shape {array.shape}; accepted: {_ACCEPTED_LENGTHS}")
        checked = tuple(array.tolist())
    if checked and min(checked) < 0:
        at = next(i for i, v in enumerate(checked) if v < 0)
        raise ValueError(f"{name}[{at}]: {checked[at]}; accepted: {_ACCEPTED_LENGTHS}")
    if most is not None and checked and max(checked) > most:
        at = next(i for i, v in enumerate(checked) if v > most)
        raise ValueError(f"{name}[{at}]: {checked[at]}; accepted: integers from 0 to {most}")
    return checked


def integer(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """`value` as an exact integer from `least` to `most`; ValueError naming `name` otherwise."""
    exact = _exact(value)
    if exact is None or exact < least:
        raise ValueError(f"{name}: {value!r}; accepted: an integer >= {least}")
    if most is not None and exact > most:
        raise ValueError(f"{name}: {exact}; accepted: an integer from {least} to {most}")
    return exact


def integer_array(name: str, values: Any) -> Int64[np.ndarray, "..."]:
    """Integers of any shape, all from 0 to 2^63 - 1; ValueError naming `name` otherwise."""
    # NumPy makes floats, or objects, of Python integers that fit no 64-bit type together.
    listed = isinstance(values, (int, list, tuple))
    array = np.asarray(values, object) if listed else np.asarray(values)
    if array.dtype == object:
        for value in array.flat:
            if _exact(value) is None:
                raise ValueError(f"{name}: {value!r}; accepted: integers from 0 to {INT64_MAX}")
    elif array.dtype.kind not in "iu":
        raise ValueError(f"{name}: dtype {array.dtype}; accepted: integers from 0 to {INT64_MAX}")
    if array.size:
        for extreme in (array.min(), array.max()):
            if not 0 <= int(extreme) <= INT64_MAX:
                raise ValueError(f"{name}: {extreme}; accepted: integers from 0 to {INT64_MAX}")
    return array.astype(np.int64)


def query_and_context_lens(
    seq_lens: Lengths, query_lens: Lengths
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both checked, of one length, and no request with more query tokens than context.

    A request's context includes the tokens of this step, so query_len <= seq_len always holds
    in a batch; the opposite usually means that the two arguments were swapped.
    """
    contexts, queries = lengths("seq_lens", seq_lens), lengths("query_lens", query_lens)
    if len(contexts) != len(queries):
        raise ValueError(
            f"query_lens: {len(queries)} requests, seq_lens: {len(contexts)}; "
            "accepted: one entry per request in both"
        )
    for i, (context, query) in enumerate(zip(contexts, queries, strict=True)):
        if query > context:
            raise ValueError(
                f"query_lens[{i}]: {query} is more than seq_lens[{i}], {context}; accepted: "
                "query_len <= seq_len, since the context includes this step's tokens"
            )
    return contexts, queries


def _element(name: str, index: int, value: Any) -> int:
    if type(value) is int:
        return value
    exact = _exact(value)
    if exact is None:
        raise ValueError(f"{name}[{index}]: {value!r}; accepted: {_ACCEPTED_LENGTHS}")
    return exact


def _exact(value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def sharding(dcp_rank: Any, dcp_world: Any, interleave: Any) -> tuple[int, int, int]:
    """Rank, world and interleave of a DCP group, checked; ValueError naming the culprit."""
    world = integer("dcp_world", dcp_world, least=1, most=INT32_MAX)
    run = integer("interleave", interleave, least=1, most=INT32_MAX)
    rank = integer("dcp_rank", dcp_rank, least=0)
    if rank >= world:
        raise ValueError(f"dcp_rank: {rank} in a world of {world}; accepted: 0 to {world - 1}")
    return rank, world, run


def query_offsets(query_start_loc: Lengths) -> tuple[int, ...]:
    """Offsets of the requests' query tokens: from 0, never falling, one more than requests."""
    offsets = lengths("query_start_loc", query_start_loc, most=INT32_MAX)
    if not offsets or offsets[0] != 0:
        raise ValueError(
            f"query_start_loc: starts with {offsets[0] if offsets else 'nothing'}; accepted: "
            "offsets from 0, one more than there are requests"
        )
    for i, (before, after) in enumerate(pairwise(offsets)):
        if after < before:
            raise ValueError(
                f"query_start_loc[{i + 1}]: {after} after {before}; accepted: offsets that "
                "never fall"
            )
    return offsets
