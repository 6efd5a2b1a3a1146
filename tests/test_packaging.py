"""What is shipped, what it depends on, and what stays apart."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSES = ("jax_impl", "torch_ref", "compare")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def git(*words: str, stdin: str = "") -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout: this copy has no .git")
    done = subprocess.run(
        ["git", *words], cwd=ROOT, input=stdin, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def requirement_lines() -> list[str]:
    lines = (ROOT / "requirements.lock").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!; ]", requirement, maxsplit=1)[0]).lower()


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def bounds(requirement: str) -> dict[str, list[int]]:
    return {sign: numbers(v) for sign, v in re.findall(r"([<>=]=)([0-9.]+)", requirement)}


LOCKED = {name_of(line): re.split("==| ;", line)[1] for line in requirement_lines()}


def test_tracked_files_stay_under_10_mb():
    sizes = {f: (ROOT / f).lstat().st_size for f in git("ls-files", "-z") if (ROOT / f).exists()}
    assert sum(sizes.values()) < 10_000_000, sorted(sizes, key=sizes.__getitem__)[-10:]


def test_environments_and_uv_lock_are_not_tracked():
    assert git("ls-files", "-z", "--", "uv.lock", ".venv", ".venv.lock") == []
    made = ["uv.lock", ".venv/bin/python", ".venv.lock"]
    assert git("check-ignore", "-z", "--stdin", stdin="\0".join(made)) == made


@pytest.mark.parametrize("script", ["crosscheck", ".ci/run"])
def test_scripts_can_be_executed(script):
    assert os.access(ROOT / script, os.X_OK)
    (entry,) = git("ls-files", "-z", "--stage", script)
    assert entry.startswith("100755 ")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", ["crosscheck", ".ci/run"])
def test_scripts_pass_shellcheck(script):
    done = subprocess.run(["shellcheck", ROOT / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_lock_holds_names_versions_and_markers_only():
    marked = re.compile(r'[a-z0-9-]+==[0-9][0-9a-z.]*( ; platform_system == "Linux")?')
    assert [line for line in requirement_lines() if not marked.fullmatch(line)] == []


def test_lock_satisfies_the_dependencies_and_the_test_tools():
    wanted = PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"]
    for requirement in wanted:
        locked = numbers(LOCKED[name_of(requirement)])
        limit = bounds(requirement)
        assert limit[">="] <= locked, requirement
        assert locked <= limit.get("<=", locked), requirement


def test_lock_leaves_out_linux_only_packages_elsewhere():
    for line in requirement_lines():
        if name_of(line).startswith(("nvidia-", "cuda-", "triton")):
            assert line.endswith(' ; platform_system == "Linux"'), line


def test_launcher_asks_for_the_lower_bounds_of_the_dependencies():
    script = (ROOT / "crosscheck").read_text("utf-8")
    asked = {}
    for name in ("needs", "test_needs"):
        words = re.search(rf"^{name}='([^']*)'", script, re.MULTILINE)
        assert words is not None
        asked |= {name_of(word): bounds(word) for word in words[1].split()}
    wanted = {name_of(need): bounds(need) for need in PROJECT["project"]["dependencies"]}
    tools = {name_of(need): bounds(need) for need in PROJECT["dependency-groups"]["dev"]}
    del wanted["matplotlib"]  # plots only: imported where one is drawn
    for module, limit in asked.items():
        if limit:
            assert limit[">="] == (wanted | tools)[module][">="], module
    assert wanted.keys() <= asked.keys()


def test_placeholder_named_flash_mla_is_no_dependency():
    extra = PROJECT["project"]["optional-dependencies"]["cuda"]
    assert [name_of(need) for need in extra] == ["jax", "sgl-flash-mla", "flashinfer-python"]
    everywhere = extra + PROJECT["project"]["dependencies"] + requirement_lines()
    assert "flash-mla" not in map(name_of, everywhere)


def imports(house: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / house).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield path, node.module


@pytest.mark.parametrize(
    ("house", "others"),
    [
        ("jax_impl", {"torch_ref", "compare", "torch"}),
        ("torch_ref", {"jax_impl", "compare", "jax", "jaxlib"}),
    ],
)
def test_implementation_imports_neither_the_other_nor_the_judge(house, others):
    found = list(imports(house))
    assert found, f"no import was found in {house}: the scan sees nothing"
    assert [entry for entry in found if entry[1].split(".")[0] in others] == []


def test_marker_of_types_is_in_each_package():
    assert [house for house in HOUSES if not (ROOT / house / "py.typed").is_file()] == []


@pytest.fixture(scope="module")
def built_wheel(tmp_path_factory) -> Path:
    try:
        importlib.metadata.version("hatchling")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hatchling, which builds the wheel, is not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / f"mla_crosscheck-{PROJECT['project']['version']}-py3-none-any.whl"


def test_wheel_holds_the_three_packages_and_nothing_else(built_wheel):
    metadata = f"mla_crosscheck-{PROJECT['project']['version']}.dist-info"
    with zipfile.ZipFile(built_wheel) as wheel:
        names = wheel.namelist()
        entry_points = wheel.read(f"{metadata}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {*HOUSES, metadata}
    assert {f"{house}/py.typed" for house in HOUSES} <= set(names)
    assert f"{metadata}/licenses/LICENSE" in names
    assert "mla-crosscheck = compare.cli:main" in entry_points


def test_an_installed_wheel_compares_with_the_recorded_results(built_wheel, tmp_path):
    installed = tmp_path / "site-packages"
    with zipfile.ZipFile(built_wheel) as wheel:
        wheel.extractall(installed)
    words = ["sparse-prefill:s_q=3,s_kv=300", "prefill-plan", "--device", "cpu"]
    words += ["--candidate", "torch", "--candidate", "jax-planner", "--require", "201"]
    words += ["--report", "json", "--out", "report"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLA_CROSSCHECK")}
    done = subprocess.run(
        [sys.executable, "-m", "compare", "run", *words],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "report/report.json").read_text("utf-8"))["rows"]
    compared = {row["case"].split(":")[0]: row["reference"] for row in rows}
    assert compared == {
        "sparse-prefill": "golden:h200/flash_mla",
        "prefill-plan": "golden:engine/vllm-0.33.0",
    }
