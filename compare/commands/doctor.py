"""``doctor``: what runs on this machine, and in a sentence why the rest doesn't."""

from __future__ import annotations

import typer
from rich.console import Console

from compare.commands.words import command
from compare.report import console as terminal
from compare.report.environment import environment
from compare.report.progress import JobProgress


@command
def doctor() -> int:
    """Print versions, devices, and what runs here or why it doesn't.

    Exit status 0, whatever runs here: a machine without a GPU isn't broken.
    """
    from compare.run import registry

    with JobProgress("asking each implementation whether it runs here"):
        described = registry.describe()
    console = Console(highlight=False)
    for name, value in environment().items():
        terminal.say(console, f"{name}: {value}")
    if "gpu" not in environment():
        terminal.say(console, "gpu: none that nvidia-smi can see")
    typer.echo()
    for name, what, reason in described:
        if reason is None:
            terminal.say(console, f"{name} runs here: {what}", style="green")
        else:
            terminal.say(console, f"{name} doesn't run here: {reason}", style="yellow")
    return 0
