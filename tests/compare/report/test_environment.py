from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from compare import _revision as revision
from compare.generate.streams import GENERATOR_VERSION
from compare.report import environment as module

SMI = """#!/bin/sh
case "$*" in
    *query-gpu=name*) printf 'NVIDIA H200\\nNVIDIA H200\\n' ;;
    *query-gpu=driver_version*) printf '580.159\\n580.159\\n' ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture(autouse=True)
def fresh():
    module.environment.cache_clear()
    yield
    module.environment.cache_clear()


def test_versions_are_those_of_the_running_libraries():
    import jax
    import numpy

    found = module.environment()
    assert found["python"] == platform.python_version()
    assert found["jax"] == jax.__version__
    assert found["numpy"] == numpy.__version__
    assert found["generator"] == str(GENERATOR_VERSION)
    assert all(isinstance(value, str) and value for value in found.values())


def test_gpus_and_driver_come_from_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = module.environment()
    assert found["gpu"] == "2 x NVIDIA H200"
    assert found["driver"] == "580.159"


def test_without_a_gpu_or_tools_nothing_fails_and_nothing_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = module.environment()
    assert not {"gpu", "driver", "revision"} & set(found)
    assert "python" in found


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"sgl-flash-mla": "1.0.0"}, "sgl-flash-mla 1.0.0"),
        ({"flash_mla": "1.0.0+9241ae3"}, "flash_mla 1.0.0+9241ae3"),
        # The empty placeholder on the package index.
        ({"flash-mla": "0.0.0"}, None),
        ({}, None),
    ],
)
def test_the_flash_mla_build_is_named_and_the_placeholder_is_none(monkeypatch, installed, said):
    monkeypatch.setattr(module, "version", installed.get)
    assert module.flash_mla_build() == said


@pytest.mark.parametrize(
    ("torch", "cuda"), [("2.11.0+cu130", "13.0"), ("2.11.0+cu128", "12.8"), ("2.11.0+cpu", None)]
)
def test_the_cuda_version_is_torch_s_own(monkeypatch, torch, cuda):
    monkeypatch.setattr(module, "version", {"torch": torch}.get)
    assert module.environment().get("cuda") == cuda


def test_the_revision_says_whether_files_differ_from_it(tmp_path):
    def git(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    folder = tmp_path / "compare" / "report"
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text("a")
    git("init", "-q")
    assert (
        revision.revision(folder / "environment.py") is None
    )  # untracked: an installed copy inside somebody's tree
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert revision.revision(folder / "environment.py") == commit
    (tmp_path / "elsewhere").write_text("b")
    assert revision.revision(folder / "environment.py") == f"{commit}-dirty"
    (tmp_path / "elsewhere").unlink()
    (folder / "environment.py").write_text("b")
    assert revision.revision(folder / "environment.py") == f"{commit}-dirty"


def test_this_checkout_s_revision_is_its_commit():
    root = Path(module.__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert module.environment()["revision"].removesuffix("-dirty") == head.stdout.strip()


def test_a_copy_without_git_is_of_the_revision_that_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv(revision.REVISION_VARIABLE, "1a2b3c")
    assert revision.revision(tmp_path / "environment.py") == "1a2b3c"
    monkeypatch.delenv(revision.REVISION_VARIABLE)
    assert revision.revision(tmp_path / "environment.py") is None
