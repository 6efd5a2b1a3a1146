"""``run``: the main job. Candidates on cases, judged against the oracle and a reference."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
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
from compare.commands.words import cases_of, catalogue_cases, command, device_of
from compare.goldens.format import DamagedGolden, UnknownGolden
from compare.protocol.case import Case
from compare.report import console as terminal
from compare.report.progress import JobProgress
from compare.suites.table import parse_case


@command
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="CASE|SUITE", help="Without any: every suite."),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that `list` shows, MODULE:FUNCTION or FILE.py:FUNCTION; may be repeated. "
            "Without it: all of this project's that can run here."
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="What candidates are compared with besides the oracle; `oracle` for the oracle "
            "alone. Without it: a CUDA kernel where one runs, else recorded results."
        ),
    ] = None,
    profile: ProfileOption = "calibrated",
    report: FormatsOption = None,
    out: OutOption = Path("crosscheck-out"),
    pattern: Annotated[
        str | None,
        typer.Option("-k", help="Only cases whose line holds this; * and ? are wildcards."),
    ] = None,
    require: Annotated[
        int, typer.Option(min=0, help="Fail (1) when fewer cases than this were compared.")
    ] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Cases at the same time. Without it: as many as help."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that one call of a candidate may take.")
    ] = 600.0,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; without it: cuda where there is one.")
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="The full matrix, and the interpreter on all that it can."),
    ] = False,
    repeat: Annotated[
        int, typer.Option(min=1, help="Run each case this often; the results must be bit-equal.")
    ] = 1,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="A line for each case, and every failure.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Failures and the headline only.")
    ] = False,
) -> int:
    """Compare candidates with FlashMLA and the float64 oracle.

    Exit status: 0 all agree; 1 a candidate disagreed or failed; 2 a usage error; 3 something
    asked for isn't available, a reference failed, or nothing was compared.
    """
    from compare.run import runner
    from compare.run.interruption import signals_end_in_order
    from compare.run.tasks import Options

    profile = profile_of(profile)
    report_files = ReportFiles(report, out)
    missing: list[str] = []

    def cases_of_suite(suite: str, full: bool) -> Sequence[Case]:
        # A suite whose cases are those of recorded results; the others can still run.
        try:
            return catalogue_cases(suite, full)
        except (DamagedGolden, UnknownGolden) as error:
            missing.append(f"{suite}: {error}")
            return ()

    cases = cases_of(words or [], full=full, cases_of_suite=cases_of_suite)
    chosen = matching(cases, pattern)
    options = Options(
        profile=profile,
        jobs=jobs,
        timeout=timeout,
        device=None if device is None else device_of(device),
        full=full,
        named=frozenset(parse_case(word) for word in words or () if ":" in word),
        repeat=repeat,
    )

    with signals_end_in_order():
        with JobProgress("loading the implementations", quiet=quiet) as progress:
            result = runner.run(
                chosen,
                candidate or None,
                reference,
                options,
                progress=progress,
            )
        unavailable = (*missing, *result.unavailable)
        result = dataclasses.replace(result, unavailable=unavailable, require=require)
        written = report_files.write(result)
        console = Console(highlight=False)
        if cases and not chosen:
            terminal.say(console, f"-k {pattern} is in none of the {len(cases)} cases.")
        terminal.show(result, console, verbose=verbose, quiet=quiet)
        say_written(written, console)
    return report_files.status(result)


def matching(cases: Sequence[Case], pattern: str | None) -> tuple[Case, ...]:
    """The cases whose line holds `pattern`; all of them without one."""
    if pattern is None:
        return tuple(cases)
    return tuple(case for case in cases if fnmatch.fnmatchcase(str(case), f"*{pattern}*"))
