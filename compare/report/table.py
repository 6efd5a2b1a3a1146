"""The two tables of a run as rows of text: one line for each suite and candidate, or one for
each case.
"""

from __future__ import annotations

import dataclasses

from compare.protocol.report import Report, Row
from compare.report import summary
from compare.report.summary import Group
from compare.report.text import number, share

SUMMARY_COLUMNS = (
    "candidate",
    "pass",
    "fail",
    "n/a",
    "bound",
    "out",
    "reference",
    "torch",
    "lse",
)
CASE_COLUMNS = (
    "status",
    "candidate",
    "bound",
    "out",
    "reference",
    "torch",
    "lse",
    "seconds",
    "case",
)
SLOWEST_COLUMNS = ("seconds", "candidate", "case")
_SLOWEST = 10
_COLUMN_NOTES = {
    "bound": "bound: the largest share used of what the calibrated tolerance allows; 100% is the "
    "limit",
    "out": "out, reference, torch: relative L2 distance of out to the float64 oracle, for the "
    "candidate, the reference and eager PyTorch in the same precision",
    "lse": "lse: the largest |lse - oracle|",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteTable:
    """The candidates of one suite, a line each. title: the suite and what it was compared with.
    columns: those of SUMMARY_COLUMNS that any line has a value for. failed: which lines hold a
    failure."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    failed: tuple[bool, ...]


def suite_tables(report: Report) -> tuple[SuiteTable, ...]:
    """One table for each suite, in the order in which they first appear."""
    groups = summary.groups(report)
    tables = []
    for suite in dict.fromkeys(group.suite for group in groups):
        members = [group for group in groups if group.suite == suite]
        references = dict.fromkeys(name for group in members for name in group.references)
        against = f" against {summary.join(references)}" if references else ""
        lines = [_summary_line(group) for group in members]
        used = [i for i, cells in enumerate(zip(*lines, strict=True)) if set(cells) != {"-"}]
        tables.append(
            SuiteTable(
                title=f"{suite}{against}",
                columns=tuple(SUMMARY_COLUMNS[i] for i in used),
                lines=tuple(tuple(line[i] for i in used) for line in lines),
                failed=tuple(group.failed > 0 for group in members),
            )
        )
    return tuple(tables)


def notes(report: Report) -> tuple[str, ...]:
    """Which cases had no reference, and what the columns mean, for those that any suite has."""
    shown = {column for suite in suite_tables(report) for column in suite.columns}
    meanings = (note for column, note in _COLUMN_NOTES.items() if column in shown)
    return (*summary.oracle_alone(report), *meanings)


def case_lines(report: Report) -> list[tuple[str, ...]]:
    """One line for each case and candidate, in CASE_COLUMNS."""
    return [_case_line(row) for row in report.rows]


def slowest_lines(report: Report) -> list[tuple[str, ...]]:
    """The ten rows whose calls took longest, in SLOWEST_COLUMNS; none where there are no more."""
    if len(report.rows) <= _SLOWEST:
        return []
    slowest = sorted(report.rows, key=lambda row: row.seconds, reverse=True)[:_SLOWEST]
    return [(f"{row.seconds:.2f}", row.candidate, row.case) for row in slowest]


def _summary_line(group: Group) -> tuple[str, ...]:
    verdicts = [row.verdict for row in group.compared]
    worst = group.worst
    return (
        group.candidate,
        str(group.passed),
        str(group.failed),
        str(group.unsupported),
        share(worst.verdict.share if worst else None),
        number(summary.worst_rel_l2(v.against_oracle.get("out") for v in verdicts)),
        number(summary.worst_rel_l2(v.reference_against_oracle.get("out") for v in verdicts)),
        number(summary.worst_rel_l2(v.torch_against_oracle.get("out") for v in verdicts)),
        number(summary.worst_abs(v.against_oracle.get("lse") for v in verdicts)),
    )


def _case_line(row: Row) -> tuple[str, ...]:
    verdict = row.verdict
    return (
        verdict.status.value,
        row.candidate,
        share(verdict.share),
        number(summary.rel_l2(verdict.against_oracle.get("out"))),
        number(summary.rel_l2(verdict.reference_against_oracle.get("out"))),
        number(summary.rel_l2(verdict.torch_against_oracle.get("out"))),
        number(summary.worst_abs([verdict.against_oracle.get("lse")])),
        f"{row.seconds:.2f}",
        row.case,
    )
