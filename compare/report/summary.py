"""What every report format says about a run: counts, worst places, reasons, and the command that
reproduces a row. The formats only lay it out."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from compare.protocol.report import Report, Row
from compare.protocol.verdict import Status, TensorMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """All rows of one candidate in one suite."""

    suite: str
    candidate: str
    rows: tuple[Row, ...]

    @property
    def statuses(self) -> Counter[Status]:
        return Counter(row.verdict.status for row in self.rows)

    @property
    def compared(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict.status is not Status.UNSUPPORTED)

    @property
    def passed(self) -> int:
        return self.statuses[Status.PASS]

    @property
    def failed(self) -> int:
        return sum(row.verdict.status.failed for row in self.rows)

    @property
    def unsupported(self) -> int:
        return self.statuses[Status.UNSUPPORTED]

    @property
    def references(self) -> tuple[str, ...]:
        """Names of the references, most frequent first; ``oracle`` where there was no other."""
        names = Counter(row.reference or "oracle" for row in self.compared)
        return tuple(name for name, _ in names.most_common())

    @property
    def worst(self) -> Row | None:
        """The row that used the largest share of its bound."""
        judged = [row for row in self.rows if row.verdict.share is not None]
        return max(judged, key=lambda row: _nan_first(row.verdict.share), default=None)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)


def groups(report: Report) -> tuple[Group, ...]:
    """One group for each suite and candidate, in the order in which they first appear."""
    by_candidate: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        by_candidate.setdefault((suite_of(row), row.candidate), []).append(row)
    return tuple(
        Group(suite=suite, candidate=candidate, rows=tuple(rows))
        for (suite, candidate), rows in by_candidate.items()
    )


def suite_of(row: Row) -> str:
    """The suite that a row's case belongs to; a caller's own tensors name themselves."""
    return row.case.partition(":")[0]


def failures(report: Report) -> tuple[Row, ...]:
    """The rows in which a candidate failed."""
    return tuple(row for row in report.rows if row.verdict.status.failed)


def failed_references(report: Report) -> dict[str, list[Row]]:
    """Rows whose reference was itself outside its bound, by what went wrong with it."""
    by_failure: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.verdict.reference_failed:
            by_failure.setdefault(row.verdict.reference_failed, []).append(row)
    return by_failure


def oracle_alone(report: Report) -> tuple[str, ...]:
    """By suite, a sentence where some cases were compared with a reference and others had none."""
    sentences = []
    rows = [row for row in report.rows if row.verdict.status is not Status.UNSUPPORTED]
    for suite in dict.fromkeys(map(suite_of, rows)):
        cases: dict[str, set[str | None]] = {}
        for row in rows:
            if suite_of(row) == suite:
                cases.setdefault(row.case, set()).add(row.reference)
        used = list(cases.values())
        names = dict.fromkeys(name for references in used for name in references if name)
        alone = sum(references == {None} for references in used)
        if names and alone:
            have = "has" if alone == 1 else "have"
            sentences.append(
                f"{alone} of {plural(len(cases), 'case')} of {suite} {have} no result in "
                f"{' or '.join(names)}: judged against the oracle alone"
            )
    return tuple(sentences)


def unsupported(report: Report) -> dict[tuple[str, str], list[Row]]:
    """Rows that a candidate can't serve, by (candidate, reason)."""
    by_reason: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        if row.verdict.status is Status.UNSUPPORTED:
            reason = row.verdict.reason or "no reason given"
            by_reason.setdefault((row.candidate, reason), []).append(row)
    return by_reason


def problems(report: Report) -> tuple[str, ...]:
    """Why the run as a whole isn't green, apart from failing rows: one sentence each."""
    sentences = list(report.unavailable)
    for reason, rows in failed_references(report).items():
        cases = {row.case for row in rows}
        sentences.append(f"The reference failed in {plural(len(cases), 'case')}: {reason}")
    if report.interrupted:
        sentences.append("The run was interrupted; the report holds what was finished.")
    if report.compared == 0:
        sentences.append("Nothing was compared.")
    if report.compared < report.require:
        sentences.append(
            f"{plural(report.compared, 'case was', 'cases were')} compared and --require asks for "
            f"{report.require}."
        )
    return tuple(sentences)


def headline(report: Report) -> str:
    """The run in one sentence."""
    failed = failures(report)
    if failed:
        cases = len({row.case for row in failed})
        names = join(dict.fromkeys(row.candidate for row in failed))
        said = f"{names} failed in {cases} of {plural(report.compared, 'compared case')}"
    elif report.compared == 0:
        said = "Nothing was compared"
    else:
        names = join(dict.fromkeys(group.candidate for group in groups(report) if group.compared))
        said = f"{names} agreed in {plural(report.compared, 'compared case')}"
    return f"{said} (exit status {report.exit_status})."


def reproducer(row: Row, report: Report) -> str:
    """The command that runs this row again, ready for a shell."""
    if row.files:
        words = ["compare", *row.files]
    else:
        words = ["run", row.case, "--candidate", row.target or row.candidate]
        words += ["--reference", row.reference or "oracle"]
    if report.profile != "calibrated":
        words += ["--profile", report.profile]
    return f"{program()} {shlex.join(words)}"


def program() -> str:
    """How this command line was started: the launcher, the console script, or the module."""
    started_as = Path(sys.argv[0]).name
    known = {"crosscheck": "./crosscheck", "mla-crosscheck": "mla-crosscheck"}
    return known.get(started_as, "python -m compare")


def rel_l2(metrics: TensorMetrics | None) -> float | None:
    """Relative L2 of a tensor that was compared, else None."""
    return None if metrics is None or metrics.elements == 0 else metrics.rel_l2


def worst_rel_l2(metrics: Iterable[TensorMetrics | None]) -> float | None:
    """The largest relative L2; NaN counts as the largest."""
    values = [value for m in metrics if (value := rel_l2(m)) is not None]
    return max(values, key=_nan_first, default=None)


def worst_abs(metrics: Iterable[TensorMetrics | None]) -> float | None:
    """The largest absolute distance; NaN counts as the largest."""
    values = [m.max_abs for m in metrics if m is not None and m.elements]
    return max(values, key=_nan_first, default=None)


def environment_line(report: Report) -> str:
    """The environment in one line: what decides the numbers first."""
    facts = report.environment
    parts = [f"{name} {facts[name]}" for name in ("python", "jax", "torch") if name in facts]
    parts.append(facts.get("flash_mla", "no FlashMLA"))
    gpu = facts.get("gpu", "no GPU")
    parts.append(f"{gpu} (driver {facts['driver']})" if "driver" in facts else gpu)
    if "revision" in facts:
        commit, dash, dirty = facts["revision"].partition("-")
        parts.append(f"revision {commit[:12]}{dash}{dirty}")
    if "generator" in facts:
        parts.append(f"inputs version {facts['generator']}")
    return ", ".join(parts)


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 case``, ``3 cases``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def join(words: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _nan_first(value: float | None) -> float:
    return float("inf") if value is None or value != value else value
