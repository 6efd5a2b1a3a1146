"""Compiled programs of JAX, kept from run to run in a folder of the user's cache: half of what a
run spends on a CPU goes into making them.

JAX's own key has the program, its options and the versions of jax and XLA, not the CPU that a
program was made for; the folder's name has. What runs under the interpreter calls back into
Python, and JAX keeps no such program.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import warnings
from pathlib import Path
from typing import Any

VARIABLE = "MLA_CROSSCHECK_CACHE"
"""Names another folder than the one in the user's cache; `off`: programs aren't kept."""

_MOST_BYTES = 128 * 2**20


def keep_programs(jax: Any) -> None:
    """Tells jax to keep what it compiles, unless it was told where to or there is no place for it.

    Two processes may use the folder at once. What can't be read or written there is compiled.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = programs_folder()
    if folder is None:
        return
    for name, value in settings(folder).items():
        jax.config.update(name, value)
    # A full disk, or half of a file that another process is just writing.
    warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation cache")


def settings(folder: Path) -> dict[str, Any]:
    """jax's options by name; small programs are the most."""
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def programs_folder() -> Path | None:
    """The folder for this machine's CPU, made if need be and not much larger than 128 MiB; None
    where it was turned off or nothing can be written."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        return None
    caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    root = Path(chosen) if chosen else Path(caches) / "mla-crosscheck" / "xla"
    folder = root / _cpu()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(root)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _make_room(root: Path) -> None:
    """Takes the programs away that were used longest ago, down to half of what is allowed. Told to
    do it, jax would look through the folder, and lock it, at every program."""
    files = [(path, path.stat()) for path in root.glob("*/*-cache")]
    size = sum(status.st_size for _, status in files)
    if size <= _MOST_BYTES:
        return
    for path, status in sorted(files, key=lambda f: max(f[1].st_atime, f[1].st_mtime)):
        with contextlib.suppress(OSError):  # another process was quicker
            path.unlink()
        size -= status.st_size
        if size <= _MOST_BYTES // 2:
            return


def _cpu() -> str:
    """A name for what this CPU can do."""
    words = [platform.machine()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        words += next(
            (line.split() for line in lines if line.startswith(("flags", "Features"))), []
        )
        words += next((line.split() for line in lines if line.startswith("model name")), [])
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]
