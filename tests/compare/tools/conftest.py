"""A kernel to record: the eager reference, small enough for any machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compare.judging.attention_call import SparsePrefillResult
from compare.protocol.case import Case
from compare.protocol.inputs import Inputs
from compare.recording import record as golden_record
from compare.run import registry


class EagerKernel:
    """The implementation `torch` under another name; `change` makes a wrong one of it."""

    name = "eager"
    suites = frozenset({"sparse-prefill"})

    def __init__(
        self, change: Callable[[SparsePrefillResult], SparsePrefillResult] = lambda result: result
    ) -> None:
        self.change = change
        self.ran: list[str] = []

    def supports(self, case: Case) -> str | None:
        return None

    def run(self, inputs: Inputs) -> SparsePrefillResult:
        self.ran.append(str(inputs.case))
        result = registry.in_process("torch", "cpu").run(inputs)
        assert isinstance(result, SparsePrefillResult)
        return self.change(result)


@pytest.fixture
def eager() -> type[EagerKernel]:
    """The kernel's class: eager() is right, eager(change) changes each result."""
    return EagerKernel


@pytest.fixture
def clean_tree(monkeypatch: pytest.MonkeyPatch) -> str:
    """A known revision of a clean tree, whatever state the checkout is in."""
    monkeypatch.setattr(golden_record, "code_revision", lambda *_, **__: "0123abc")
    return "0123abc"
