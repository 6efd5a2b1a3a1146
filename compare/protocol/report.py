"""One run of the judge as data: what every report format is written from."""

from __future__ import annotations

import dataclasses

from compare.protocol.verdict import Status, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate on one case. case: its line. reference: the name of what it was compared with
    (None: the oracle alone). seconds: wall time of the candidate's call, compilation included.
    target: the words that find the candidate, where its author gave it a name of its own.
    files: of tensors in files, their paths, the candidate's first; no case makes those again.
    """

    case: str
    candidate: str
    reference: str | None
    verdict: Verdict
    seconds: float
    target: str | None = None
    files: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A run. environment: versions, device, revision, generator version, as text by name.
    unavailable: sentences about what was asked for by name and isn't available, or golden files
    that are damaged.
    interrupted: Ctrl-C ended it early; rows hold what was finished. require: --require N."""

    rows: tuple[Row, ...]
    environment: dict[str, str]
    profile: str = "calibrated"
    unavailable: tuple[str, ...] = ()
    interrupted: bool = False
    require: int = 0
    seconds: float = 0.0

    @property
    def compared(self) -> int:
        """Distinct cases on which at least one candidate was really compared."""
        return len({row.case for row in self.rows if row.verdict.status is not Status.UNSUPPORTED})

    @property
    def exit_status(self) -> int:
        """1: a candidate disagreed or failed, or fewer cases than --require were compared. 3:
        something asked for by name isn't available, a reference failed, or nothing was compared.
        0 otherwise. (2, words that are off, is the command line's own.)
        """
        if any(row.verdict.status.failed for row in self.rows) or self.compared < self.require:
            return 1
        reference_failed = any(row.verdict.reference_failed for row in self.rows)
        if self.unavailable or reference_failed or self.compared == 0 or self.interrupted:
            return 3
        return 0
