"""What the judge's tests share: small inputs, and the yardstick as a result that is right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compare.judging.attention import evidence_of
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.suites.table import make_inputs, parse_case

YardstickOf = Callable[[SparsePrefillInputs], SparsePrefillResult]


@pytest.fixture
def inputs_of() -> Callable[[str], SparsePrefillInputs]:
    """The inputs of a sparse-prefill case, written without its suite."""

    def make(words: str) -> SparsePrefillInputs:
        inputs = make_inputs(parse_case(f"sparse-prefill:{words}"))
        assert isinstance(inputs, SparsePrefillInputs)
        return inputs

    return make


@pytest.fixture
def yardstick_of() -> YardstickOf:
    """Eager torch's result as arrays that a test may damage."""

    def make(inputs: SparsePrefillInputs) -> SparsePrefillResult:
        evidence = evidence_of(inputs)
        blocks = list(evidence.blocks(np.arange(evidence.num_tokens)))
        return SparsePrefillResult(
            out=np.concatenate([rows.torch_out for rows in blocks]),
            max_logits=np.concatenate([rows.torch_max_logits for rows in blocks]),
            lse=np.concatenate([rows.torch_lse for rows in blocks]),
        )

    return make
