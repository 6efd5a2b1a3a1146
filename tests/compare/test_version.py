from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest

from compare import _version

PROJECT = '[project]\nname = "mla-crosscheck"\nversion = "9.8.7"\n'


@pytest.fixture
def version_at(monkeypatch):
    def version(root: Path) -> str:
        monkeypatch.setattr(_version, "_ROOT", root)
        return _version.version.__wrapped__()

    return version


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


def head(checkout: Path) -> str:
    words = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_checkout_names_its_revision(version_at, checkout):
    assert version_at(checkout) == f"9.8.7+g{head(checkout)}"


def test_changed_checkout_says_that_it_is_dirty(version_at, checkout):
    (checkout / "pyproject.toml").write_text(PROJECT + "\n")
    assert version_at(checkout) == f"9.8.7+g{head(checkout)}.dirty"


def test_exported_tree_is_not_named_after_the_repository_around_it(version_at, checkout):
    inside = checkout / "exported"
    inside.mkdir()
    (inside / "pyproject.toml").write_text(PROJECT)
    assert version_at(inside) == "9.8.7"


def test_repository_without_a_commit_has_no_revision(version_at, checkout):
    shutil.rmtree(checkout / ".git")
    subprocess.run(["git", "-C", checkout, "init", "-q"], check=True)
    assert version_at(checkout) == "9.8.7"


@pytest.mark.parametrize("beside", [None, '[project]\nname = "other"\nversion = "1"\n'])
def test_installed_copy_gives_the_version_of_its_metadata(
    version_at, tmp_path, monkeypatch, beside
):
    if beside:
        (tmp_path / "pyproject.toml").write_text(beside)
    monkeypatch.setattr(importlib.metadata, "version", {"mla-crosscheck": "5.5"}.__getitem__)
    assert version_at(tmp_path) == "5.5"
