"""What the two ``plan`` commands have in common: a shipped and a fixed plan of one batch, judged,
as JSON or as text."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from compare.commands.words import UsageError
from compare.judging.plans import SHIPPED
from compare.protocol.inputs import Inputs, Result
from compare.protocol.suite import Suite
from compare.report import console as terminal

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPlans(abc.ABC):
    """shipped_wrong, fixed_wrong: broken rules, one sentence each; a disagreement of the two fixed
    planners is among the latter."""

    shipped_wrong: tuple[str, ...]
    fixed_wrong: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        return 1 if self.shipped_wrong or self.fixed_wrong else 0

    @abc.abstractmethod
    def json(self) -> str:
        """Both plans as JSON text."""

    @abc.abstractmethod
    def show(self, console: Console) -> None:
        """Prints the table and the sentences."""

    def print(self, *, as_json: bool) -> int:
        """Prints both plans; returns the exit status."""
        if as_json:
            typer.echo(self.json())
        else:
            self.show(Console(highlight=False))
        return self.exit_status

    def _json(
        self,
        *,
        arguments: Mapping[str, Any],
        case: str,
        shipped: Mapping[str, Any],
        fixed: Mapping[str, Any],
        **more: Any,
    ) -> str:
        return json.dumps(
            {
                "arguments": arguments,
                "case": case,
                "shipped": {"rules": SHIPPED, **shipped, "wrong": self.shipped_wrong},
                "fixed": {"rules": "fixed", **fixed, "wrong": self.fixed_wrong},
                **more,
                "exit_status": self.exit_status,
            },
            indent=1,
        )

    @staticmethod
    def _say_head(console: Console, *, case: str, shipped: str, fixed: str) -> None:
        terminal.say(console, case, style="dim")
        terminal.say(console, f"shipped ({SHIPPED}): {shipped}")
        terminal.say(console, f"fixed: {fixed}")

    def _say_wrong(self, console: Console) -> None:
        for sentence in self.shipped_wrong:
            terminal.say(console, f"shipped ({SHIPPED}): {sentence}", style="red")
        for sentence in self.fixed_wrong:
            terminal.say(console, f"fixed: {sentence}", style="red")

    def _say_right(self, console: Console, both: str | None) -> None:
        """The last line; both: what is said where nothing goes wrong and there are two plans."""
        if self.exit_status == 0 and both is not None:
            terminal.say(console, both, style="green")
        elif not self.fixed_wrong:
            terminal.say(console, "The fixed plan is right.", style="green")


def suite_of_command(words: str) -> Suite:
    """The suite whose plans the command `words` sets beside one another."""
    from compare.suites.table import SUITES

    return next(suite for suite in SUITES.values() if suite.plan_command == words)


def planned(name: str, inputs: Inputs) -> Result:
    """A planner's plan of a batch. UsageError for arguments that it doesn't accept."""
    from compare.run import registry

    try:
        return registry.find(name).run(inputs)
    except ValueError as error:
        raise UsageError(str(error)) from error
