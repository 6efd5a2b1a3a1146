"""Reading what a caller gives: numbers, words and answers, refused in a sentence where they aren't
what is accepted. Nothing is cast."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def known_word(word: str, known: Iterable[str], what: str) -> str:
    """`word` where it is known; ValueError with the nearest known one otherwise."""
    if word in known:
        return word
    names = list(known)
    if not isinstance(word, str):
        raise ValueError(f"{what}: {word!r}; accepted: {', '.join(names)}")
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"there is no {what} {word!r}; the nearest is {close!r} (accepted: {', '.join(names)})"
    )


def whole_number(value: Any, name: str) -> int:
    """`value` as an int; ValueError where it isn't a whole number."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: {value!r}; accepted: a whole number") from None


def real_number(value: Any, name: str) -> float:
    """`value` as a float; ValueError where it isn't a number. NaN and infinity are the oracle's."""
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: {value!r}; accepted: a finite number") from None


def whole_or_lengths(value: Any, name: str) -> Any:
    """A whole number or lengths, whatever holds them, as int or a tuple of int; None and a bool as
    they are; ValueError else."""
    if value is None or isinstance(value, bool):
        return value
    one = not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0
    try:
        return operator.index(value) if one else tuple(operator.index(item) for item in value)
    except TypeError:
        raise ValueError(f"{name}: {value!r}; accepted: whole numbers") from None


def whole_numbers(values: Iterable[Any], name: str) -> tuple[int, ...]:
    """`values` as they are; TypeError where one isn't a whole number, which int() would cut."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name}: {values!r}; accepted: whole numbers") from None


def named_fields(
    answer: Any, name: str, fields: Sequence[str], needed: Sequence[str]
) -> dict[str, Any]:
    """The fields of what `name` gave back: a mapping, an object with at least the `needed` ones as
    attributes, or a tuple of all; TypeError for anything else."""
    if isinstance(answer, Mapping):
        return {field: answer.get(field) for field in fields}
    if all(hasattr(answer, field) for field in needed):
        return {field: getattr(answer, field, None) for field in fields}
    if isinstance(answer, (tuple, list)) and len(answer) == len(fields):
        return dict(zip(fields, answer, strict=True))
    size = f" of {len(answer)}" if isinstance(answer, (tuple, list)) else ""
    raise TypeError(
        f"{name} returned a {type(answer).__name__}{size}; accepted: ({', '.join(fields)}) or "
        "a mapping or an object with these names"
    )


def field_of(answer: Any, name: str) -> Any:
    """A field that a mapping or an object may have; None where it has none."""
    return answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None)
