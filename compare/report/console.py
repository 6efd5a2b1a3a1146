"""A report on the terminal: a table, the failures in full, and the headline last."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from compare.protocol.report import Report
from compare.report import summary, table, text

# More than this is a list to grep, not to read: the JSON report and --verbose have all of them.
_FAILURE_LIMIT = 20
_STYLES = {"PASS": "green", "UNSUPPORTED": "dim"}


def show(report: Report, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Prints the report. verbose: a line for each case and candidate too, and every failure.
    quiet: failures, what is wrong with the run, and the headline only."""
    if not quiet:
        say(console, summary.environment_line(report), style="dim")
        if report.rows:
            show_tables(report, console)
        if verbose and report.rows:
            show_cases(report, console)
    show_failures(report, console, limit=None if verbose else _FAILURE_LIMIT)
    if not quiet:
        for line in text.unsupported_lines(report):
            say(console, f"UNSUPPORTED {line}", style="dim")
    if verbose and not quiet:
        show_slowest(report, console)
    headline = summary.headline(report)
    for sentence in summary.problems(report):
        if not headline.startswith(sentence.rstrip(".")):
            say(console, sentence, style="yellow")
    say(console, headline, style="bold green" if report.exit_status == 0 else "bold red")


def show_tables(report: Report, console: Console) -> None:
    """For each suite one line for each candidate; then which cases had no reference, and what the
    columns are."""
    for suite in table.suite_tables(report):
        styles = ["red" if failed else "" for failed in suite.failed]
        say(console, suite.title, style="bold")
        print_table(console, suite.columns, suite.lines, styles, text_columns={0})
    notes = table.notes(report)
    for note in notes:
        say(console, note, style="dim")
    if notes:
        console.print()


def show_cases(report: Report, console: Console) -> None:
    """One line for each case and candidate, the case last."""
    lines = table.case_lines(report)
    styles = [_STYLES.get(line[0], "red") for line in lines]
    text_columns = {0, 1, len(table.CASE_COLUMNS) - 1}
    print_table(console, table.CASE_COLUMNS, lines, styles, text_columns=text_columns)


def show_slowest(report: Report, console: Console) -> None:
    """The calls that took longest, of many."""
    lines = table.slowest_lines(report)
    if lines:
        say(console, "The slowest calls, compilation included", style="bold")
        styles = [""] * len(lines)
        print_table(console, table.SLOWEST_COLUMNS, lines, styles, text_columns={1, 2})


def show_failures(report: Report, console: Console, *, limit: int | None) -> None:
    """Every failing row in full, up to `limit`; beyond it, how many more there are."""
    failed = summary.failures(report)
    for row in failed[:limit]:
        first, *rest = text.failure_lines(row, report)
        say(console, first, style="bold red")
        for line in rest:
            say(console, f"  {line}")
        console.print()
    if limit is not None and len(failed) > limit:
        say(console, f"{len(failed) - limit} more failures: --verbose or --report json has them")
        console.print()


def say(console: Console, line: str, style: str = "") -> None:
    """One line as it is: never wrapped, so that a case line or a command can be copied, and with
    nothing in it taken for markup.
    """
    console.print(Text(line, style=style), soft_wrap=True)


def print_table(
    console: Console,
    columns: Sequence[str],
    lines: Sequence[Sequence[str]],
    styles: Sequence[str],
    *,
    text_columns: set[int],
) -> None:
    """A table as wide as its content. rich's own would be folded to the terminal's width, or to 80
    columns in a CI log, and a case line in pieces can't be copied."""
    widths = [max(map(cell_len, column)) for column in zip(columns, *lines, strict=True)]

    def padded(cells: Sequence[str]) -> str:
        filled = [
            cell + " " * (width - cell_len(cell))
            if i in text_columns
            else " " * (width - cell_len(cell)) + cell
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(filled).rstrip()

    say(console, padded(columns), style="underline")
    for line, style in zip(lines, styles, strict=True):
        say(console, padded(line), style=style)
    console.print()
