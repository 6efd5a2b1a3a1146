"""The version that reports and `--version` name."""

from __future__ import annotations

import importlib.metadata
import tomllib
from functools import cache
from pathlib import Path

from compare._revision import checkout

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
    if (found := checkout(_ROOT)) is None:
        return number
    return f"{number}+g{found.commit[:12]}" + (".dirty" if found.changed != () else "")


def _checkout_number(root: Path) -> str | None:
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    except (FileNotFoundError, KeyError):
        return None
    return project["version"] if project.get("name") == _DISTRIBUTION else None
