"""The command line: `mla-crosscheck`, `python -m compare` and `./crosscheck` are the same words.

Nothing heavy is imported here: each command imports what it needs when it runs.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from compare.commands.bench import bench
from compare.commands.compare_files import compare_files
from compare.commands.doctor import doctor
from compare.commands.listing import list_
from compare.commands.plan import plan
from compare.commands.plan_words import PlanCommand
from compare.commands.record import record
from compare.commands.run import run

app = typer.Typer(
    name="mla-crosscheck",
    help="Does this attention kernel compute the same thing as FlashMLA, and if not, where does it "
    "first go wrong?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command("list")(list_)
app.command()(doctor)
app.command(
    cls=PlanCommand,
    epilog="plan --decode plans the rows of a decode batch; plan --decode --help has its options.",
)(plan)
app.command()(record)
app.command()(bench)
app.command("compare")(compare_files)


def _version(wanted: bool) -> None:
    if wanted:
        from compare._version import version

        typer.echo(f"mla-crosscheck {version()}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line on `words`, by default the program's own; its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A path that the terminal's encoding lacks a letter of is no reason to lose a report.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(None if words is None else list(words))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
