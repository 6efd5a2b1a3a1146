"""``record``: results of a kernel, kept so that machines without it can be compared with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from compare.commands.words import (
    UsageError,
    cases_of,
    catalogue_cases,
    command,
    device_of,
    one_of,
)
from compare.suites.table import SUITES


@command
def record(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="CASE|SUITE", help="Without any: the suite sparse-prefill."),
    ] = None,
    kernel: Annotated[str, typer.Option(help="The implementation to record.")] = "flash_mla",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder DEVICE/KERNEL of the recorded results; without it goldens/h200/KERNEL."
        ),
    ] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Record from a tree with changes; it will say so.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Record again what is there already.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="The cases of `run --full`.")] = False,
    device: Annotated[str | None, typer.Option(help="Where the kernel runs.")] = None,
) -> int:
    """Record what a kernel computes, for comparisons on machines that don't have it.

    A result is kept only if the judge passes it, and only from a clean git tree; a case that the
    kernel doesn't serve is skipped. Exit status: 0 all others recorded, 1 some were refused, 2 a
    usage error, 3 the kernel isn't available.
    """
    from compare.recording.record import KernelNotAvailable, RecordingRefused
    from compare.recording.record import record as record_golden
    from compare.run import registry

    if ":" not in kernel:  # MODULE:FUNCTION is looked up where it is loaded
        one_of("--kernel", kernel, list(registry.TABLE))
    cases = cases_of(words or [next(iter(SUITES))], full=full, cases_of_suite=catalogue_cases)
    folder = out or Path("goldens/h200") / _folder_name(kernel, {case.suite for case in cases})
    try:
        done = record_golden(
            kernel,
            cases,
            folder,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
            allow_dirty=allow_dirty,
            device=None if device is None else device_of(device),
            force=force,
        )
    except RecordingRefused as refusal:
        print(f"mla-crosscheck: {refusal}", file=sys.stderr)
        done, status = refusal.recording, 3 if isinstance(refusal, KernelNotAvailable) else 1
    else:
        status = 0
    skipped = f", {len(done.skipped)} skipped" if done.skipped else ""
    typer.echo(
        f"{folder}: {len(done.recorded)} recorded, {len(done.kept)} kept as they were{skipped}"
    )
    return status


def _folder_name(kernel: str, suites: set[str]) -> str:
    """A kernel's own folder; one for each suite where the name serves several."""
    from compare.run import registry

    if ":" in kernel:
        raise UsageError(f"--kernel {kernel}: --out says in which folder its results are kept")
    name = kernel.replace("-", "_")
    if len(registry.TABLE[kernel].suites) == 1 or len(suites) != 1:
        return name
    records = SUITES[next(iter(suites))].records
    return name if records is None else name + records.ending
