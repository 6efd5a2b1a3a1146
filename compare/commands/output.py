"""Options that `run` and `compare` share: tolerances, and the files that a report is written to."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compare.commands.words import UsageError, comma_list, one_of
from compare.protocol.report import Report
from compare.report import console as terminal
from compare.report import files

PROFILES = ("calibrated", "flashmla", "both")

ProfileOption = Annotated[str, typer.Option(help=f"Tolerances: {', '.join(PROFILES)}.")]
FormatsOption = Annotated[
    list[str] | None,
    typer.Option(help=f"Files to write: {', '.join(files.FORMATS)}; joined by commas."),
]
OutOption = Annotated[Path, typer.Option(help="Folder of those files.")]


def profile_of(word: str) -> str:
    """The profile that `word` names; UsageError otherwise."""
    return one_of("--profile", word, PROFILES)


class ReportFiles:
    """The files of --report and --out, checked before anything runs: a run of minutes must not end
    in a failure to write."""

    def __init__(self, words: Sequence[str] | None, folder: Path) -> None:
        self._formats = [one_of("--report", w, tuple(files.FORMATS)) for w in comma_list(words)]
        self._folder = folder
        self._failure: str | None = None
        if self._formats:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--out {folder}: no folder can be made there ({error.strerror})"
                ) from None
            paths = [folder / files.FORMATS[name][0] for name in self._formats]
            for path in (folder, *(path for path in paths if path.exists())):
                if not os.access(path, os.W_OK) or (path != folder and not path.is_file()):
                    raise UsageError(f"--out {folder}: {path} can't be written to")

    def write(self, report: Report) -> tuple[Path, ...]:
        """Writes them; without --report there are none. Done before a report is shown: a pipe that
        nobody reads any more must not cost the files."""
        try:
            return files.write(report, self._formats, self._folder) if self._formats else ()
        except OSError as error:  # a full disk: the report is still shown
            self._failure = f"the files of the report can't be written: {error}"
            return ()

    def status(self, report: Report) -> int:
        """The exit status of the command: 3 besides where its files couldn't be written."""
        if self._failure is None:
            return report.exit_status
        print(f"mla-crosscheck: {self._failure}", file=sys.stderr)
        return report.exit_status or 3


def say_written(written: Sequence[Path], console: Console) -> None:
    """Where the files of a report are."""
    for path in written:
        terminal.say(console, f"wrote {path}", style="dim")
