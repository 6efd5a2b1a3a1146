"""What a planner of prefill chunks is called with and gives back."""

from __future__ import annotations

from typing import Any

from compare.judging.plans import PlanResult, PrefillPlanInputs, plan_chunks
from compare.protocol.signature import Signature


class PrefillPlanSignature(Signature[PrefillPlanInputs, PlanResult]):
    """One batch, and its chunks."""

    def check(self, inputs: PrefillPlanInputs) -> None:
        """ValueError for a batch that no planner may be given."""
        lengths, queries = inputs.seq_lens, inputs.query_lens
        if len(lengths) != len(queries):
            raise ValueError(f"query_lens: {len(queries)} requests; seq_lens has {len(lengths)}")
        for request, (length, query) in enumerate(zip(lengths, queries, strict=True)):
            if not 0 <= query <= length:
                raise ValueError(
                    f"query_lens[{request}]: {query}; accepted: 0 to the request's length, {length}"
                )
        for name in ("window", "max_model_len", "max_num_batched_tokens", "chunk_size"):
            if getattr(inputs, name) < 1:
                raise ValueError(f"{name}: {getattr(inputs, name)}; accepted: 1 and more")
        if inputs.compress_ratio < (1 if inputs.has_compressed else 0):
            raise ValueError(f"compress_ratio: {inputs.compress_ratio}; accepted: 0 and more")

    def read(self, answer: Any, name: str, inputs: PrefillPlanInputs) -> PlanResult:
        """A sequence of chunks, as objects with the six attributes or tuples of them."""
        return PlanResult(chunks=plan_chunks(answer, name))


SIGNATURE = PrefillPlanSignature(
    inputs_type=PrefillPlanInputs,
    result_type=PlanResult,
    telling="query_lens",
    takes_arrays=False,
)
