"""What implementations of sparse prefill have in common that run inside this process."""

from __future__ import annotations

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.one_suite import OneSuite
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.chunks import run_chunks


class SparsePrefill(OneSuite[SparsePrefillCase, SparsePrefillInputs]):
    """Base of sparse prefill; inputs.chunks is None in a `call`."""

    case_type = SparsePrefillCase
    inputs_type = SparsePrefillInputs

    def call_chunk(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        """One call for a chunk of a plan, which may be empty."""
        return self.call(inputs)

    def compute(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        if inputs.chunks is not None:
            return run_chunks(self.call_chunk, inputs)
        return self.call(inputs)
