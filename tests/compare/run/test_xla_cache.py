"""Programs that are kept from run to run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compare.houses import xla_cache
from compare.houses.xla_cache import VARIABLE, keep_programs, programs_folder, settings


class FakeJax:
    """Notes the options that it is told."""

    def __init__(self, folder: str | None = None) -> None:
        self.told: dict[str, Any] = {}
        self.config = SimpleNamespace(
            jax_compilation_cache_dir=folder, update=self.told.__setitem__
        )


@pytest.fixture(autouse=True)
def cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in settings(tmp_path):  # what tests are under
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def test_programs_are_kept_in_the_user_s_cache_by_cpu(cache_home: Path) -> None:
    folder = programs_folder()
    assert folder is not None and folder.parent == cache_home / "mla-crosscheck" / "xla"
    assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0
    jax = FakeJax()
    keep_programs(jax)
    assert jax.told["jax_compilation_cache_dir"] == str(folder)
    assert jax.told["jax_persistent_cache_min_compile_time_secs"] == 0


def test_another_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    folder = programs_folder()
    assert folder is not None and folder.parent == tmp_path / "mine"


def test_nothing_is_kept_where_it_is_turned_off(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    jax = FakeJax()
    keep_programs(jax)
    assert not jax.told and not cache_home.exists()


def test_a_folder_that_jax_was_given_stays() -> None:
    jax = FakeJax("/elsewhere")
    keep_programs(jax)
    assert not jax.told


def test_a_place_where_nothing_can_be_made_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    jax = FakeJax()
    keep_programs(jax)
    assert programs_folder() is None and not jax.told


def test_a_folder_that_cannot_be_written_to_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert programs_folder() is None


def test_the_programs_used_longest_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = programs_folder()
    assert folder is not None
    for age in range(10):
        path = folder / f"program{age}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(xla_cache, "_MOST_BYTES", 1000)
    programs_folder()
    assert len(list(folder.iterdir())) == 10
    monkeypatch.setattr(xla_cache, "_MOST_BYTES", 800)
    programs_folder()
    assert sorted(path.name for path in folder.iterdir()) == [
        f"program{age}-cache" for age in range(4)
    ]


def test_a_program_is_found_again_by_another_process_and_a_broken_one_is_made_anew(
    cache_home: Path,
) -> None:
    code = """
import sys, jax
from compare.houses.jax_backend import import_jax
import_jax()
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
assert int(jax.jit(lambda x: x * 3 + 1)(5)) == 16
print(sum(name.endswith("cache_hits") for name in hits))
"""

    def hits() -> int:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True, text=True, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        assert not done.stderr
        return int(done.stdout)

    assert hits() == 0
    assert hits() >= 1
    for path in cache_home.glob("*/*/*/*-cache"):
        path.write_bytes(path.read_bytes()[:50])
    assert hits() == 0
