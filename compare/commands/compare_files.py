"""``compare``: one's own tensors in a safetensors file, judged without any kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compare.commands.output import (
    FormatsOption,
    OutOption,
    ProfileOption,
    ReportFiles,
    profile_of,
    say_written,
)
from compare.commands.words import UsageError, command
from compare.report import console as terminal
from compare.report.progress import JobProgress
from compare.report.text import passed_lines


@command
def compare_files(
    mine: Annotated[
        Path, typer.Argument(metavar="MINE.safetensors", help="The result, with its call.")
    ],
    theirs: Annotated[
        Path | None,
        typer.Argument(metavar="[THEIRS.safetensors]", help="Another result of the same call."),
    ] = None,
    profile: ProfileOption = "calibrated",
    report: FormatsOption = None,
    out: OutOption = Path("crosscheck-out"),
) -> int:
    """Judge the result in a file against the float64 oracle, and against another one.

    A file holds `out` and `lse`, of sparse prefill perhaps `max_logits`, and either the metadata
    `case` or the tensors of the call with the metadata `sm_scale`, for DCP decode also
    `suite=dcp-decode`. Metadata `lse=base2` and `empty_lse` declare another convention. Exit
    status: as `run`.
    """
    from compare.bundle import bundle

    profile = profile_of(profile)
    report_files = ReportFiles(report, out)
    for path in (mine, theirs):
        if path is not None and not path.is_file():
            raise UsageError(f"there is no file {path}")
    with JobProgress(f"judging {mine}"):
        try:
            judged = bundle.compare_files(mine, theirs, profile=profile)
        except bundle.BundleError as error:
            raise UsageError(str(error)) from None
    written = report_files.write(judged)
    console = Console(highlight=False)
    terminal.show(judged, console, verbose=True)
    for row in judged.rows:
        if not row.verdict.status.failed:  # a failing row has said it
            for line in passed_lines(row):
                terminal.say(console, line, style="dim")
    say_written(written, console)
    return report_files.status(judged)
