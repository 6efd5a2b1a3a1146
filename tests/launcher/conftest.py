"""A machine of its own for each test: a checkout, a PATH with chosen programs, no home."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    "awk",
    "cat",
    "cksum",
    "df",
    "dirname",
    "flock",
    "mkdir",
    "readlink",
    "rm",
    "sed",
    "sh",
    "sleep",
]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where `./crosscheck` of a copied checkout is started. folder holds all of it."""

    folder: Path

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    @property
    def venv_python(self) -> Path:
        return self.checkout / ".venv/bin/python"

    @property
    def stamp(self) -> Path:
        return self.checkout / ".venv/crosscheck-stamp"

    def script(self, path: str, text: str) -> Path:
        """Writes a program; a bare name goes on PATH."""
        target = self.folder / (path if "/" in path else f"bin/{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"#!/bin/sh\n{text}\n")
        target.chmod(target.stat().st_mode | stat.S_IXUSR)
        return target

    def python(
        self,
        path: str,
        version: tuple[int, int, int] = (3, 12, 1),
        *,
        lacks: tuple[str, ...] = (),
        has: dict[str, str] | None = None,
        install: str = "works",
    ) -> Path:
        """Adds a fake interpreter that has everything but what it `lacks`."""
        fake = Path(__file__).with_name("fake_python.py")
        target = self.script(path, f'exec {sys.executable} -I -S {fake} "$0.json" "$@"')
        config = {"version": version, "lacks": lacks, "has": has or {}, "install": install}
        Path(f"{target}.json").write_text(json.dumps(config))
        return target

    def environment(self, **changes: str | Path) -> dict[str, str]:
        base = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder / "home")}
        base["FAKE_LOG"] = str(self.folder / "log")
        return base | {name: str(value) for name, value in changes.items()}

    def start(
        self,
        *words: str,
        program: str | Path | None = None,
        cwd: Path | None = None,
        **changes: str | Path,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program or self.checkout / "crosscheck", *words],
            env=self.environment(**changes),
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    def started(self) -> list[dict[str, Any]]:
        """What the fake interpreters were told to do besides answering questions, in order."""
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def installations(self) -> int:
        return sum(entry["arguments"][:3] == ["-m", "pip", "install"] for entry in self.started())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    (made.folder / "bin").mkdir()
    (made.folder / "home").mkdir()
    made.checkout.mkdir()
    for name in ("crosscheck", "requirements.lock"):
        shutil.copy(ROOT / name, made.checkout)
    for name in PROGRAMS:
        if found := shutil.which(name):
            os.symlink(found, made.folder / "bin" / name)
    return made
