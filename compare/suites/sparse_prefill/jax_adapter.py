"""jax_impl's sparse prefill on each of its backends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from compare.houses.jax_backend import (
    JaxBackend,
    compiled_launch,
    import_jax,
    jax_device,
)
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.timing import Launch
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.implementation import SparsePrefill


class JaxSparsePrefill(JaxBackend, SparsePrefill):
    """jax_impl.sparse_prefill on one backend. config: another tuning of the Hopper kernel, to be
    timed under a name of its own.
    """

    functions = ("jax_impl:sparse_prefill",)

    def __init__(self, name: str, device: str | None = None, *, config: Any = None) -> None:
        super().__init__(name, device)
        self._config = config

    def refuses(self, case: SparsePrefillCase) -> str | None:
        return self.too_large(case.blocks)

    def call(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        jax = import_jax()
        from jax_impl import sparse_prefill

        attend: Any = sparse_prefill  # NumPy arrays are as welcome as jax's
        compiled = self.compilation(max(inputs.q.size, inputs.kv.size))
        with jax.default_device(jax_device(self.device)), compiled:
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
            return as_result((out, max_logits, lse))

    def prepare(self, inputs: SparsePrefillInputs) -> Launch:
        """The call compiled, sink and lengths given where the inputs have them."""
        optional = {"attn_sink": inputs.attn_sink, "topk_length": inputs.topk_length}
        given = {name: array for name, array in optional.items() if array is not None}

        def attend(q: Any, kv: Any, indices: Any, given: dict[str, Any]) -> Any:
            if self._config is None:
                from jax_impl import sparse_prefill

                return tuple(
                    sparse_prefill(
                        q, kv, indices, inputs.sm_scale, backend=self.name, validate=False, **given
                    )
                )
            return _configured(q, kv, indices, given, inputs.sm_scale, self._config)

        return compiled_launch(
            attend, (inputs.q, inputs.kv, inputs.indices, given), self.device, as_result
        )


def as_result(found: Any) -> SparsePrefillResult:
    """(out, max_logits, lse) of JAX as the judge's result."""
    out, max_logits, lse = map(np.asarray, found)
    return SparsePrefillResult(out=out, max_logits=max_logits, lse=lse)


def _configured(
    q: Any, kv: Any, indices: Any, given: dict[str, Any], sm_scale: float, config: Any
) -> Any:
    """The Hopper kernel itself, with another Config."""
    from jax_impl.prefill.sparse.kernel_sm90.launch import attend

    scale = np.full((1,), sm_scale * math.log2(math.e), np.float32)
    sink = given.get("attn_sink", np.full((q.shape[1],), -np.inf, np.float32))
    length = given.get("topk_length", np.full((q.shape[0],), indices.shape[1], np.int32))
    return attend(q, kv, indices, scale, sink, length, num_kv=kv.shape[0], config=config)
