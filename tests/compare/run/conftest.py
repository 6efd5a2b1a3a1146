from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compare.isolation.worker import Isolated

PLAN_CASE = "prefill-plan:seq=40+40+16,q=5+0+3,window=8,max_len=64,max_tokens=16,chunk=1"


@pytest.fixture
def candidate_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a user's module and gives its path."""

    def write(code: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return path

    return write


@pytest.fixture
def isolated(candidate_file: Callable[[str], Path]) -> Iterator[Callable[[str], Isolated]]:
    """A user's function `f` in a worker process, which ends with the test."""
    made: list[Isolated] = []

    def make(code: str) -> Isolated:
        made.append(Isolated(f"{candidate_file(code)}:f", finder="compare.run.registry:in_process"))
        return made[-1]

    yield make
    for implementation in made:
        implementation.close()
