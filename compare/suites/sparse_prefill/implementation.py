"""What implementations of sparse prefill have in common that run inside this process."""

from __future__ import annotations

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.implementation import Unsupported
from compare.protocol.inputs import Inputs
from compare.protocol.one_suite import OneSuite
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.chunks import run_chunks


class SparsePrefill(OneSuite[SparsePrefillCase]):
    """Base of sparse prefill: a subclass says what stops it here and computes one call."""

    suites = frozenset({"sparse-prefill"})
    case_type = SparsePrefillCase

    def call(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        """One call; inputs.chunks is None."""
        raise NotImplementedError

    def call_chunk(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        """One call for a chunk of a plan, which may be empty."""
        return self.call(inputs)

    def run(self, inputs: Inputs) -> SparsePrefillResult:
        if not isinstance(inputs, SparsePrefillInputs):
            raise Unsupported(f"{self.name} is for sparse-prefill")
        if inputs.chunks is not None:
            return run_chunks(self.call_chunk, inputs)
        return self.call(inputs)
