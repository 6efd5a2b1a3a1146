"""``bench``: speed of implementations beside the kernels that they are compared with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from compare.commands.words import NotAvailable, UsageError, cases_of, command, device_of
from compare.suites.table import SUITES, parse_case


@command
def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="CASE|SUITE", help="Without any: every suite that is timed."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="What is timed beside: a name that `list` shows, or FILE.py:FUNCTION; may be "
            "repeated. The first has to run. Without it: the suite's CUDA kernel."
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="What is timed. Without it: this project's own that can run here."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="NAME:key=value,...: the kernel with another tuning, under NAME."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the measurement, or its .json file.")] = Path(
        "crosscheck-out"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender has.")] = 5,
    launches: Annotated[int, typer.Option(min=1, help="Launches that the slope is over.")] = 20,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Speed alone.")] = False,
    children: Annotated[int, typer.Option(min=1, help="Processes that measure memory.")] = 4,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; without it: cuda where there is one.")
    ] = None,
) -> int:
    """Time implementations beside CUDA kernels, taking turns, after each was found right.

    Exit status: 0 all were measured; 1 a contender was wrong or failed; 2 a usage error; 3 the
    reference doesn't run here.
    """
    # Both frameworks share one GPU: neither may take all of its memory at the start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from compare.bench import bench as program
    from compare.bench.measure import Progress, out_file
    from compare.bench.timing import Method

    timed = [name for name, suite in SUITES.items() if suite.timing]

    def lines(suite: str, full: bool) -> list:
        timing = SUITES[suite].bench()
        if timing is None:
            raise UsageError(f"{suite} isn't timed; those that are: {', '.join(timed)}")
        return [parse_case(line) for line in timing.lines]

    cases = cases_of(words or timed, full=False, cases_of_suite=lines)
    suites = "-".join(dict.fromkeys(case.suite for case in cases))
    options = program.Options(
        candidates=tuple(candidate or ()),
        against=tuple(against or ()),
        configs=tuple(config or ()),
        memory=not no_memory,
        children=children,
        device=None if device is None else device_of(device),
        method=Method(launches=launches, rounds=rounds),
    )
    path = out_file(out, f"{suites}-speed")
    try:
        measured = program.run(cases, options, path, Progress())
    except program.NoReference as error:
        raise NotAvailable(str(error)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(measured.table())
    print(f"written to {path}", file=sys.stderr)
    return 1 if measured.not_measured else 0
