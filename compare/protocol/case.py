"""A case is one line of text that is its own reproducer.

    SUITE:key=value,key=value,...

Keys stand in the order of the suite's dataclass, defaults are left out, lists use ``+``
(``q=0+5+0+3``). ``parse_case(str(case)) == case`` for every case, and an unknown or repeated key,
or a value outside what the key accepts, is a ``CaseError`` that names the nearest key or what is
accepted (exit status 2 on the command line).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

LARGEST = 2**31 - 1
"""The largest whole number of a case: sizes and lengths end in int32 arrays."""


class CaseError(ValueError):
    """A case line that can't be understood; the message says what was written and what is
    accepted.
    """


@dataclasses.dataclass(frozen=True)
class Key:
    """How one key of a case line is read and written.

    parse: text -> value, raising ValueError for what isn't accepted. show: value -> text.
    accepted: the words an error message uses after "accepted:".
    """

    parse: Callable[[str], Any]
    accepted: str
    show: Callable[[Any], str] = str


def case_field(default: Any, key: Key) -> Any:
    """A dataclass field of a case: its default and the Key that reads it."""
    return dataclasses.field(default=default, metadata={"key": key})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Base of every suite's case. Subclasses are frozen dataclasses whose fields come from
    case_field.
    """

    suite: ClassVar[str]

    def __str__(self) -> str:
        words = [
            f"{field.name}={field.metadata['key'].show(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.suite}:{','.join(words)}"

    def check(self) -> None:
        """Raises CaseError where keys that are fine alone don't fit together."""

    def shape(self) -> tuple[object, ...]:
        """What programs are compiled for: cases of a suite that share it share them too."""
        return ()

    def elements(self) -> int:
        """About how many numbers its tensors hold; 0 for a handful."""
        return 0


def parse_case_of(case_type: type[Case], words: str) -> Case:
    """The case of `case_type` that the text after ``SUITE:`` describes."""
    keys: Mapping[str, Key] = {f.name: f.metadata["key"] for f in dataclasses.fields(case_type)}
    values: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        name, equals, text = word.partition("=")
        if name not in keys:
            nearest = difflib.get_close_matches(name, keys, n=1, cutoff=0.0)
            raise CaseError(f"{case_type.suite} has no key {name!r}; the nearest is {nearest[0]!r}")
        if not equals:
            raise CaseError(f"{case_type.suite}: {name} has no value; write {name}=VALUE")
        if name in values:
            raise CaseError(f"{case_type.suite}: {name} is given twice")
        try:
            values[name] = keys[name].parse(text)
        except ValueError as error:
            detail = f" ({error})" if str(error) else ""
            raise CaseError(
                f"{case_type.suite}: {name}={text} isn't accepted{detail}; "
                f"accepted: {keys[name].accepted}"
            ) from None
    case = case_type(**values)
    case.check()
    return case


def integer(least: int, most: int | None = None) -> Key:
    """A whole number in [least, most], or up to LARGEST."""
    last = LARGEST if most is None else most

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= last:
            raise ValueError
        return value

    return Key(parse, f"a whole number from {least} to {last}")


def flag() -> Key:
    """0 or 1."""
    return word("0", "1", convert=lambda text: text == "1", show=lambda value: str(int(value)))


def word(*words: str, convert: Callable[[str], Any] = str, show: Callable[[Any], str] = str) -> Key:
    """One of a few words."""

    def parse(text: str) -> Any:
        if text not in words:
            raise ValueError
        return convert(text)

    return Key(parse, " | ".join(words), show)


def number(least: float | None = None, most: float | None = None, *words: str) -> Key:
    """A finite float in [least, most], or one of `words` kept as text."""

    def parse(text: str) -> float | str:
        if text in words:
            return text
        value = float(text)
        outside = (least is not None and not value >= least) or (
            most is not None and not value <= most
        )
        if outside or value in (float("inf"), float("-inf")) or value != value:
            raise ValueError
        return value

    span = "a finite number"
    if least is not None:
        span += f" from {least:g}" + (f" to {most:g}" if most is not None else "")
    return Key(parse, " | ".join([*words, span]), lambda v: v if isinstance(v, str) else repr(v))


def integers(least: int) -> Key:
    """Whole numbers joined by ``+``, each in [least, LARGEST]; ``none`` is the empty list."""

    def parse(text: str) -> tuple[int, ...]:
        if text == "none":
            return ()
        values = tuple(int(part) for part in text.split("+"))
        if any(not least <= value <= LARGEST for value in values):
            raise ValueError
        return values

    return Key(
        parse,
        f"whole numbers from {least} to {LARGEST} joined by + (or none)",
        lambda values: "+".join(map(str, values)) or "none",
    )


def integer_or(name: str, least: int, most: int | None = None) -> Key:
    """A whole number in [least, most], or the word `name`."""
    whole = integer(least, most)
    parse: Callable[[str], Any] = lambda text: text if text == name else whole.parse(text)  # noqa: E731
    return Key(parse, f"{name} | {whole.accepted}")
