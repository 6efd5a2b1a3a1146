"""jax_impl's sparse prefill on each of its backends."""

from __future__ import annotations

from typing import Any

import numpy as np

from compare.houses.jax_backend import (
    JaxBackend,
    import_jax,
    jax_device,
)
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.implementation import SparsePrefill


class JaxSparsePrefill(JaxBackend, SparsePrefill):
    """jax_impl.sparse_prefill on one backend."""

    functions = ("jax_impl:sparse_prefill",)

    def refuses(self, case: SparsePrefillCase) -> str | None:
        return self.too_large(case.blocks)

    def call(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        jax = import_jax()
        from jax_impl import sparse_prefill

        attend: Any = sparse_prefill  # NumPy arrays are as welcome as jax's
        with jax.default_device(jax_device(self.device)), self.compilation():
            out, max_logits, lse = attend(
                inputs.q,
                inputs.kv,
                inputs.indices,
                inputs.sm_scale,
                d_v=inputs.d_v,
                attn_sink=inputs.attn_sink,
                topk_length=inputs.topk_length,
                backend=self.name,
            )
            return SparsePrefillResult(
                out=np.asarray(out), max_logits=np.asarray(max_logits), lse=np.asarray(lse)
            )
