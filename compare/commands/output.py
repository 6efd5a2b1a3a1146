"""Options that `run` and `compare` share: tolerances, and the files that a report is written to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compare.commands.words import WordsOff, comma_list, one_of
from compare.report import console as terminal
from compare.report import files
from compare.report.report import Report

PROFILES = ("calibrated", "flashmla", "both")

ProfileOption = Annotated[str, typer.Option(help=f"Tolerances: {', '.join(PROFILES)}.")]
FormatsOption = Annotated[
    list[str] | None,
    typer.Option(help=f"Files to write: {', '.join(files.FORMATS)}; joined by commas."),
]
OutOption = Annotated[Path, typer.Option(help="Folder of those files.")]


def profile_of(word: str) -> str:
    """The profile that `word` names; WordsOff otherwise."""
    return one_of("--profile", word, PROFILES)


class ReportFiles:
    """The files of --report and --out, checked before anything runs: a run of minutes must not end
    in a failure to write."""

    def __init__(self, words: Sequence[str] | None, folder: Path) -> None:
        self._formats = [one_of("--report", w, tuple(files.FORMATS)) for w in comma_list(words)]
        self._folder = folder
        if self._formats:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise WordsOff(
                    f"--out {folder}: no folder can be made there ({error.strerror})"
                ) from None

    def write(self, report: Report, console: Console) -> None:
        """Writes them and says where; without --report there are none."""
        if not self._formats:
            return
        for path in files.write(report, self._formats, self._folder):
            terminal.say(console, f"wrote {path}", style="dim")
