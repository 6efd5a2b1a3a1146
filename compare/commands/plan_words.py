"""Which of the two plans the words ``plan ...`` ask for: ``--decode`` has options of its own."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from compare.commands.plan_decode import plan_decode

FLAG = "--decode"


class PlanCommand(TyperCommand):
    """``plan``, or with ``--decode`` among its words the plan of a decode batch."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        if FLAG not in args:
            return super().make_context(info_name, args, *more, **extra)
        rest = [word for word in args if word != FLAG]
        return _decode().make_context(f"{info_name} {FLAG}", rest, *more, **extra)


def _decode() -> Any:
    alone = typer.Typer(
        add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    alone.command()(plan_decode)
    return get_command(alone)
