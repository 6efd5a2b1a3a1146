"""What git says of the code that is running: its commit, and which files differ from it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

REVISION_VARIABLE = "MLA_CROSSCHECK_REVISION"
"""Says what revision this code is of, where there is no git checkout to ask."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkout:
    """A git work tree. changed: the tracked files that differ from its commit; untracked: those
    that git neither tracks nor ignores. None for both where git can't tell.
    """

    commit: str
    changed: tuple[str, ...] | None
    untracked: tuple[str, ...] | None


def checkout(root: Path) -> Checkout | None:
    """The work tree whose top is `root`. None where git knows no commit of it: a copy that was
    exported without its history isn't named after a repository that happens to lie around it.
    """
    said = _git(root, "rev-parse", "HEAD", "--show-toplevel")
    if said is None:
        return None
    commit, top = said.splitlines()
    if Path(top).resolve() != root.resolve():
        return None
    status = _git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
    if status is None:
        return Checkout(commit=commit, changed=None, untracked=None)
    entries = [entry for entry in status.split("\0") if entry]
    return Checkout(
        commit=commit,
        changed=tuple(entry[3:] for entry in entries if not entry.startswith("??")),
        untracked=tuple(entry[3:] for entry in entries if entry.startswith("??")),
    )


def revision(file: Path = Path(__file__)) -> str | None:
    """The git commit that holds `file`, with ``-dirty`` when tracked files differ from it or
    untracked ones aren't ignored; None where git doesn't track the file (an installed wheel). Where
    git can't tell, what MLA_CROSSCHECK_REVISION says: a copy of a checkout on a GPU machine has
    left its .git behind.
    """
    tracked = _git(file.parent, "ls-files", "--error-unmatch", file.name)
    top = _git(file.parent, "rev-parse", "--show-toplevel") if tracked else None
    found = checkout(Path(top.strip())) if top else None
    if found is None:
        return os.environ.get(REVISION_VARIABLE)
    clean = found.changed == found.untracked == ()
    return found.commit + ("" if clean else "-dirty")


def _git(root: Path, *words: str) -> str | None:
    """What git prints; None without git, where it fails, or where it takes half a minute."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
