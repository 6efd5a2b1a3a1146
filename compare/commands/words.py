"""Reading what was written on the command line, and saying in a sentence what is wrong with it.

A `UsageError` ends the program with exit status 2, a `NotAvailable` with 3; neither shows a
traceback.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer

from compare.goldens.format import DamagedGolden, UnknownGolden
from compare.protocol.case import LARGEST, Case, CaseError
from compare.protocol.implementation import UnknownImplementation
from compare.suites.table import SUITES, default_cases, full_cases, parse_case

_MOST_DIGITS = 4300  # that int() reads


class UsageError(ValueError):
    """The words of the command can't be understood; the message is a sentence (exit status 2)."""


class NotAvailable(RuntimeError):
    """What was asked for by name isn't available; the message is a sentence (exit status 3)."""


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Makes a function that returns an exit status into a typer command whose expected failures
    are sentences on stderr: 2 for a usage error, 3 for what isn't available, 130 for Ctrl-C."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            status = function(*args, **kwargs)
        except (UsageError, CaseError, UnknownImplementation) as error:
            status = _say(error, 2)
        except (NotAvailable, DamagedGolden, UnknownGolden) as error:
            status = _say(error, 3)
        except KeyboardInterrupt:
            status = _say("interrupted", 130)
        raise typer.Exit(status)

    # The return type is the command's, not a value that typer is to print.
    run.__annotations__ = {**function.__annotations__, "return": None}
    return run


def _say(sentence: object, status: int) -> int:
    print(f"mla-crosscheck: {sentence}", file=sys.stderr)
    return status


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that looks most like `word`."""
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)[0]


def one_of(option: str, word: str, known: Sequence[str]) -> str:
    """`word` if it is known; UsageError with the nearest one and the list otherwise."""
    if word in known:
        return word
    raise UsageError(
        f"{option} {word}: there is no {word!r}; the nearest is {nearest(word, known)!r} "
        f"(accepted: {', '.join(known)})"
    )


def device_of(word: str) -> str:
    """`word` if it names a device: cpu, cuda or cuda:N."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", word):
        return word
    raise UsageError(f"--device {word}: accepted are cpu, cuda and cuda:N, such as cuda:1")


def comma_list(values: Iterable[str] | None) -> list[str]:
    """The words of an option that may be repeated and may hold several words joined by commas."""
    return [word.strip() for value in values or () for word in value.split(",") if word.strip()]


def lengths(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers up to LARGEST joined by commas, plus signs or blanks; ``none`` is the empty
    list.
    """
    if text.strip() == "none":
        return ()
    words = re.split(r"\s*[,+]\s*|\s+", text.strip())
    if words == [""]:
        raise UsageError(f"{option} is empty; write whole numbers joined by commas, or none")
    for word in words:
        digits = word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS
        if not digits or int(word) > LARGEST:
            raise UsageError(
                f"{option} {text}: {word!r} isn't accepted; accepted: whole numbers from 0 to "
                f"{LARGEST}, joined by commas, plus signs or blanks"
            )
    return tuple(map(int, words))


def cases_of(
    words: Sequence[str], *, full: bool, cases_of_suite: Callable[[str, bool], Sequence[Case]]
) -> tuple[Case, ...]:
    """The cases that the words name, each once: a word with a colon is a case, one without is a
    suite and stands for all its cases, and no word stands for every suite."""
    cases: dict[Case, None] = {}
    for word in words or SUITES:
        if ":" in word:
            cases[parse_case(word)] = None
        elif word in SUITES:
            cases.update(dict.fromkeys(cases_of_suite(word, full)))
        else:
            raise UsageError(
                f"no suite is called {word!r}; the nearest is {nearest(word, SUITES)!r} "
                "(a case is written SUITE:key=value,...)"
            )
    return tuple(cases)


def catalogue_cases(suite: str, full: bool) -> Sequence[Case]:
    """The cases of a suite: those of the recorded results, or the full matrix."""
    return full_cases(suite) if full else default_cases(suite)
