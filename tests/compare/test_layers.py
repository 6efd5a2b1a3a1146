"""Imports in compare go one way, whether they stand at the top of a file or inside a function."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

from compare.suites.table import SUITES

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "compare").rglob("*.py"))
}
FLOORS = (
    ("protocol", "_revision", "_version"),
    ("generate", "goldens"),
    ("judging", "houses"),
    ("suites",),
    ("suites.table",),
    ("isolation", "user"),
    ("run", "report"),
    ("recording", "bundle", "bench", "calibrate"),
    ("commands",),
    ("cli", "__main__", ""),
)
"""From the ground up: a module imports its own floor and those below."""


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in MODULES else node.module for name in inner}
    return found & MODULES.keys()


IMPORTS = {module: imports_of(path) for module, path in MODULES.items()}


def floor(module: str) -> int:
    """The floor whose name is the longest beginning of the module's."""
    rest = module.removeprefix("compare").removeprefix(".")
    names = {name: height for height, names in enumerate(FLOORS) for name in names}
    parts = rest.split(".")
    beginnings = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(names[name] for name in beginnings if name in names)


def suite(module: str) -> str | None:
    """The suite's folder that a module stands in."""
    parts = module.split(".")
    return parts[2] if len(parts) > 3 and parts[1] == "suites" else None


def test_there_are_no_circles() -> None:
    graphlib.TopologicalSorter(IMPORTS).prepare()


def test_nothing_imports_what_stands_above_it() -> None:
    arrows = [(a, b) for a, inner in IMPORTS.items() for b in inner if floor(b) > floor(a)]
    assert not arrows


def test_a_suite_is_reached_through_the_table_alone() -> None:
    into = [(a, b) for a, inner in IMPORTS.items() for b in inner if suite(b)]
    strangers = [(a, b) for a, b in into if suite(a) != suite(b) and a != "compare.suites.table"]
    assert not strangers


def test_no_suite_is_named_outside_its_folder() -> None:
    named = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            word = node.value if isinstance(node, ast.Constant) else None
            if word in SUITES and str(word).replace("-", "_") != suite(module):
                named.append((module, word))
    assert not named
