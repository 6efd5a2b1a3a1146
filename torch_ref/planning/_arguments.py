"""Checks of what the planners are given: whole numbers, from lists, NumPy arrays or tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex


def lengths(
    name: str, values: Sequence[SupportsIndex], *, each: str = "request"
) -> tuple[int, ...]:
    """`values` as integers; ValueError unless they are whole and not negative, one per `each`."""
    try:
        whole = tuple(_whole(value) for value in values)
    except TypeError as error:
        raise ValueError(f"{name}: {error}; accepted are whole numbers, one a {each}") from error
    for i, length in enumerate(whole):
        if length < 0:
            raise ValueError(f"{name}: {length} for {each} {i}; accepted are 0 and more")
    return whole


def _whole(value: SupportsIndex) -> int:
    # A mask in the place of lengths is a mistake, although Python counts True as 1.
    if isinstance(value, bool):
        raise TypeError("a bool is no number here")
    return operator.index(value)


def at_least(name: str, value: SupportsIndex, least: int = 1) -> int:
    """`value` as an integer; ValueError unless it is whole and `least` or more."""
    try:
        whole = _whole(value)
    except TypeError as error:
        raise ValueError(f"{name}: {error}; accepted are whole numbers") from error
    if whole < least:
        raise ValueError(f"{name}: {whole}; accepted are {least} and more")
    return whole
