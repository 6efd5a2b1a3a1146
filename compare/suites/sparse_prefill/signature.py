"""What a function of sparse prefill is called with and gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.signature import (
    BF16,
    FLOAT32,
    INT32,
    SM_SCALE,
    FileFormat,
    Signature,
    Tensor,
)
from compare.suites.sparse_prefill.chunks import run_chunks


def _unkept(inputs: SparsePrefillInputs) -> str | None:
    if inputs.d_v != 512:
        return f"d_v is {inputs.d_v}; a bundle holds calls with d_v 512"
    if inputs.chunks is not None:
        return "chunks of a caller's own can't be kept in a bundle; leave them None"
    return None


class SparsePrefillSignature(Signature[SparsePrefillInputs, SparsePrefillResult]):
    """One call of the kernel; the tokens of each chunk are a call of their own."""

    def run(
        self,
        call: Callable[[SparsePrefillInputs], SparsePrefillResult],
        inputs: SparsePrefillInputs,
    ) -> SparsePrefillResult:
        return call(inputs) if inputs.chunks is None else run_chunks(call, inputs)

    def shaped(self, values: dict[str, Any]) -> dict[str, Any]:
        """kv and indices may have an axis of one kv head, as in FlashMLA's interface."""
        for name in ("kv", "indices"):
            if values[name].ndim == 3 and values[name].shape[1] == 1:
                values[name] = values[name][:, 0]
        return values


SIGNATURE = SparsePrefillSignature(
    inputs_type=SparsePrefillInputs,
    result_type=SparsePrefillResult,
    telling="indices",
    tensors={
        "q": Tensor(dtypes=BF16, axes="T H D"),
        "kv": Tensor(dtypes=BF16, axes="S D"),
        "indices": Tensor(dtypes=INT32, axes="T K"),
        "attn_sink": Tensor(dtypes=FLOAT32, axes="H", needed=False),
        "topk_length": Tensor(dtypes=INT32, axes="T", needed=False),
    },
    numbers=("sm_scale",),
    withheld=("chunks",),
    results={"out": True, "lse": True, "max_logits": False, "out_rows": False},
    answered=("out", "max_logits", "lse"),
    empty_lse="+inf",
    file=FileFormat(words={"sm_scale": SM_SCALE}, unkept=_unkept),
)
