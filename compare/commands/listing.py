"""``list``: the suites with the keys of their cases, the implementations, the recorded results."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compare.cases.case import Case
from compare.commands.words import cases_of, catalogue_cases, command
from compare.report import console as terminal
from compare.suites import SUITES


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
        console.print(keys_table(suite.case_type))
    terminal.say(console, "Implementations", style="bold")
    console.print(implementations_table())
    terminal.say(console, "Recorded results", style="bold")
    console.print(goldens_table())
    return 0


def keys_table(case_type: type[Case]) -> Table:
    """The keys of a case line, with their defaults and what each accepts."""
    grid = _grid("key", "default", "accepted")
    for field in dataclasses.fields(case_type):
        key = field.metadata["key"]
        grid.add_row(field.name, Text(key.show(field.default)), Text(key.accepted))
    return grid


def implementations_table() -> Table:
    """Every implementation that the registry offers: what it is, and what keeps it from running."""
    from compare.run import registry

    grid = _grid("name", "what", "here")
    for name, what, reason in registry.describe():
        grid.add_row(Text(name), Text(what), Text("runs" if reason is None else reason))
    return grid


def goldens_table() -> Table:
    """The recorded results, with how many cases each holds."""
    from compare.tools.golden import DamagedGolden, available, golden_cases

    grid = _grid("name", "cases")
    for name in available():
        cases: Any
        try:
            cases = str(len(golden_cases(name)))
        except DamagedGolden as error:
            cases = str(error)
        grid.add_row(Text(f"golden:{name}"), Text(cases))
    return grid


def _grid(*columns: str) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        grid.add_column(column, no_wrap=i == 0)
    return grid
