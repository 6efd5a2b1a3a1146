"""The command line as a function of its words."""

from __future__ import annotations

import dataclasses

from typer.testing import CliRunner

from compare.cli import app


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Exit status, stdout and stderr of one command."""

    status: int
    out: str
    err: str


def command_line(*words: str) -> Outcome:
    """Runs `mla-crosscheck WORDS`. An exception that isn't an exit fails the test: users never see
    a traceback."""
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return Outcome(result.exit_code, result.stdout, result.stderr)
