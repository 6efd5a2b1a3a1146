"""The version that reports and `--version` name."""

from __future__ import annotations

import importlib.metadata
import subprocess
import tomllib
from functools import cache
from pathlib import Path

_DISTRIBUTION = "mla-crosscheck"
_ROOT = Path(__file__).resolve().parent.parent


@cache
def version() -> str:
    """The version of the code that is running, as PEP 440 text.

    From a checkout the number is pyproject.toml's, followed by the git revision where git can
    tell it: `0.1.0+g1a2b3c4d5e6f`, with `.dirty` at the end when tracked files differ from it.
    An installed copy gives the number of its own metadata.
    """
    if (number := _checkout_number(_ROOT)) is None:
        return importlib.metadata.version(_DISTRIBUTION)
    revision = _git_revision(_ROOT)
    return number if revision is None else f"{number}+g{revision}"


def _checkout_number(root: Path) -> str | None:
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    except (FileNotFoundError, KeyError):
        return None
    return project["version"] if project.get("name") == _DISTRIBUTION else None


def _git_revision(root: Path) -> str | None:
    # A checkout that was copied or exported without its .git must not be named after a
    # repository that happens to lie around it.
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12"]
    try:
        answer = subprocess.run(
            [*command, "--dirty=.dirty"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git, no commit yet, or another's checkout
        return None
    return answer.stdout.strip()
