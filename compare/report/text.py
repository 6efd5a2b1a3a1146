"""The plain lines that describe one row; the console, JUnit and the job summary all use them."""

from __future__ import annotations

import math

from compare.protocol.report import Report, Row
from compare.protocol.verdict import Worst
from compare.report import summary


def first_line(row: Row) -> str:
    """The status, with the diagnosis if there is one and the reason otherwise."""
    verdict = row.verdict
    said = verdict.diagnosis[0].sentence if verdict.diagnosis else verdict.reason
    return f"{verdict.status.value}: {said}" if said else verdict.status.value


def failure_lines(row: Row, report: Report) -> list[str]:
    """Everything that a failing row has to say: the reason with its tolerance, what the tensors
    show, the worst places with both values, and the command that runs it again.
    """
    verdict = row.verdict
    lines = [f"{verdict.status.value} {row.candidate} {row.case}"]
    if verdict.reason:
        lines.append(verdict.reason)
    for found in verdict.diagnosis:
        said = "" if found.sentence in verdict.reason else f": {found.sentence}"
        lines.append(f"diagnosis {found.name}{said}")
    lines += [f"worst {worst_place(worst)}" for worst in verdict.worst]
    lines += passed_lines(row)
    lines.append(f"reproduce: {summary.reproducer(row, report)}")
    return lines


def passed_lines(row: Row) -> list[str]:
    """What is worth knowing about any row: its reference, its rows, what wasn't compared, notes,
    waiver.
    """
    verdict = row.verdict
    lines = []
    if verdict.reference_failed:
        lines.append(f"the reference {row.reference} failed itself: {verdict.reference_failed}")
    if verdict.rows_judged < verdict.rows_total:
        lines.append(
            f"judged by the oracle: {verdict.rows_judged:,} of {verdict.rows_total:,} rows"
        )
    if verdict.not_compared:
        lines.append(f"not compared: {', '.join(verdict.not_compared)}")
    lines += [f"note: {note}" for note in verdict.notes]
    if verdict.waived_by:
        lines.append(f"waived by {verdict.waived_by}")
    return lines


def worst_place(worst: Worst) -> str:
    """``lse[3, 17]: got 1.2, expected 0.8, 3.1 times what is allowed there``; without the last part
    where the value has to be exactly the expected one, and in words where any finite one is due."""
    place = ", ".join(map(str, worst.index))
    due = "a finite value" if worst.expected is None else f"{worst.expected:.9g}"
    values = f"{worst.tensor}[{place}]: got {worst.got:.9g}, expected {due}"
    if not math.isfinite(worst.share):
        return values
    return f"{values}, {worst.share:.3g} times what is allowed there"


def share(value: float | None) -> str:
    """A share of the bound as a percentage; a dash where there is none."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.1%}" if value < 10 else f"{value:.3g}x"


def number(value: float | None) -> str:
    """A distance with three digits; a dash where nothing was compared."""
    if value is None or value == 0:
        return "-" if value is None else "0"
    if not 1e-2 <= value < 1e3:
        digits, e, exponent = f"{value:.2e}".partition("e")
        return f"{digits}e{int(exponent)}" if e else digits
    return f"{value:.3g}"


def unsupported_lines(report: Report) -> list[str]:
    """One line for each candidate and reason: how many cases it stands for. What the report says
    already, as unavailable, isn't said again."""
    return [
        f"{candidate}, {summary.plural(len(rows), 'case')}: {reason}"
        for (candidate, reason), rows in summary.unsupported(report).items()
        if f"{candidate}: {reason}" not in report.unavailable
    ]
