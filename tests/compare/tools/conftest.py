"""A kernel to record: the eager reference, small enough for any machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import torch_ref
from compare.cases.case import Case
from compare.cases.inputs import Inputs, SparsePrefillInputs
from compare.run.convert import to_numpy, to_torch
from compare.run.result import SparsePrefillResult
from compare.tools import golden_record


class EagerKernel:
    """torch_ref.sparse_prefill as an implementation; `change` makes a wrong one of it."""

    name = "eager"
    suites = frozenset({"sparse-prefill"})

    def __init__(
        self, change: Callable[[SparsePrefillResult], SparsePrefillResult] = lambda result: result
    ) -> None:
        self.change = change
        self.calls: list[int] = []

    def supports(self, case: Case) -> str | None:
        return None

    def run(self, inputs: Inputs) -> SparsePrefillResult:
        assert isinstance(inputs, SparsePrefillInputs)
        self.calls.append(len(inputs.q))
        optional = {
            name: to_torch(array)
            for name in ("attn_sink", "topk_length")
            if (array := getattr(inputs, name)) is not None
        }
        result = torch_ref.sparse_prefill(
            to_torch(inputs.q),
            to_torch(inputs.kv),
            to_torch(inputs.indices),
            inputs.sm_scale,
            **optional,
        )
        arrays = {name: to_numpy(getattr(result, name)) for name in ("out", "max_logits", "lse")}
        return self.change(SparsePrefillResult(**arrays, notes=("ran eagerly",)))


@pytest.fixture
def clean_tree(monkeypatch: pytest.MonkeyPatch) -> str:
    """A known revision of a clean tree, whatever state the checkout is in."""
    monkeypatch.setattr(golden_record, "code_revision", lambda *_, **__: "0123abc")
    return "0123abc"


@pytest.fixture
def eager() -> type[EagerKernel]:
    """The kernel's class: eager() is right, eager(change) changes each result."""
    return EagerKernel
