"""``list``: the suites with the keys of their cases, the implementations, the recorded results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from compare.commands.words import cases_of, catalogue_cases, command
from compare.goldens import files
from compare.goldens.format import DamagedGolden
from compare.protocol.case import Case
from compare.report import console as terminal
from compare.report import summary
from compare.report.progress import JobProgress
from compare.suites.table import SUITES


@command
def list_(
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUITE", help="Print the cases of these, one on a line."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The cases of `run --full`.")] = False,
) -> int:
    """Print the suites with their keys, the implementations and the recorded results; with SUITE
    its cases, one on a line.
    """
    if suites:
        for case in cases_of(suites, full=full, cases_of_suite=catalogue_cases):
            typer.echo(str(case))
        return 0
    console = Console(highlight=False)
    for suite in SUITES.values():
        counts = [len(catalogue_cases(suite.name, all_of_them)) for all_of_them in (False, True)]
        more = f", {counts[1]} with --full" if counts[1] != counts[0] else ""
        terminal.say(console, f"{suite.name}: {counts[0]} cases{more}", style="bold")
        _print(console, ("key", "default", "accepted"), keys(suite.case_type))
    terminal.say(console, "Implementations", style="bold")
    _print(console, ("name", "here", "what"), implementations())
    terminal.say(console, "Recorded results", style="bold")
    _print(console, ("name", "cases"), recorded())
    return 0


def keys(case_type: type[Case]) -> list[tuple[str, str, str]]:
    """The keys of a case line: name, default, what is accepted."""
    fields = [(field, field.metadata["key"]) for field in dataclasses.fields(case_type)]
    return [(field.name, key.show(field.default), key.accepted) for field, key in fields]


def implementations() -> list[tuple[str, str, str]]:
    """Every implementation that the registry offers: name, whether it runs here, what it is;
    `doctor` has the reasons.
    """
    from compare.run import registry

    with JobProgress("asking each implementation whether it runs here"):
        described = registry.describe()
    return [(name, "no" if reason else "yes", what) for name, what, reason in described]


def recorded() -> list[tuple[str, str]]:
    """The recorded results: name, and how many cases there are, or what is damaged."""
    lines = []
    for name in files.available():
        try:
            held = summary.plural(len(files.golden_cases(name)), "case")
        except DamagedGolden as error:
            held = str(error)
        lines.append((f"golden:{name}", held))
    return lines


def _print(console: Console, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    text_columns = set(range(len(columns)))
    terminal.print_table(console, columns, lines, [""] * len(lines), text_columns=text_columns)
