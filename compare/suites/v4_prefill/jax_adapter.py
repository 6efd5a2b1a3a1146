"""jax_impl's V4 prefill path on each of its backends."""

from __future__ import annotations

from typing import Any

import numpy as np

from compare.houses.jax_backend import (
    JaxBackend,
    compiled_launch,
    import_jax,
    jax_device,
)
from compare.judging.plans import plan_chunks
from compare.protocol.implementation import Unsupported
from compare.protocol.timing import Launch
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.case import V4PrefillCase
from compare.suites.v4_prefill.implementation import V4Prefill, chunk_stages


class JaxV4Prefill(JaxBackend, V4Prefill):
    """jax_impl.v4_prefill on one backend. backend: where it isn't the name, and then attention
    reads the pages itself (fused).
    """

    functions = ("jax_impl:v4_prefill",)

    def __init__(self, name: str, device: str | None = None, *, backend: str | None = None) -> None:
        super().__init__(name, device, backend=backend)
        self.fused = backend is not None

    def refuses(self, case: V4PrefillCase) -> str | None:
        if self.fused and case.format != "v4-fp8":
            return f"format={case.format}: attention without a workspace reads pages of v4-fp8"
        return self.too_large(case.blocks)

    def call(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        jax = import_jax()
        from jax_impl import v4_prefill
        from jax_impl.kv_cache import PagedKV
        from jax_impl.planning import PrefillChunk

        run: Any = v4_prefill  # NumPy arrays are as welcome as jax's
        plan = inputs.prescribed_plan
        for number, chunk in enumerate(plan or ()):
            if chunk.query_start == chunk.query_end:
                raise Unsupported(
                    f"chunk {number} of the plan has no query tokens; jax_impl runs no such plan"
                )
        compiled = self.compilation(inputs.q.size)
        with jax.default_device(jax_device(self.device)), compiled:
            compressed = None
            if inputs.compressed_cache is not None and inputs.compressed_page is not None:
                compressed = PagedKV(
                    inputs.compressed_cache, inputs.compressed_page, inputs.kv_format
                )
            found = run(
                inputs.q,
                PagedKV(inputs.swa_cache, inputs.swa_page, inputs.kv_format),
                inputs.swa_block_table,
                inputs.query_start_loc,
                inputs.seq_lens,
                inputs.sm_scale,
                compress_ratio=inputs.compress_ratio,
                compressed=compressed,
                compressed_block_table=inputs.compressed_block_table,
                topk_indices=inputs.topk_indices,
                window=inputs.window,
                attn_sink=inputs.attn_sink,
                image_spans=inputs.image_spans,
                max_image_tokens=inputs.max_image_tokens,
                seq_lens_bound=inputs.seq_lens_bound,
                max_model_len=inputs.max_model_len,
                max_num_batched_tokens=inputs.max_num_batched_tokens,
                chunk_size=inputs.chunk_size,
                plan=None if plan is None else tuple(PrefillChunk(**vars(c)) for c in plan),
                fused=self.fused,
                backend=self.backend,
                keep_stages=not self.fused,
            )
            return V4PrefillResult(
                out=np.asarray(found.out),
                max_logits=np.asarray(found.max_logits),
                lse=np.asarray(found.lse),
                plan=None if found.plan is None else plan_chunks(found.plan, self.name),
                stages=chunk_stages(found.stages),
            )

    def prepare(self, inputs: V4PrefillInputs) -> Launch:
        """The whole path compiled; its chunks are planned on the host before."""
        from jax_impl import v4_prefill
        from jax_impl.kv_cache import PagedKV

        run: Any = v4_prefill
        arrays = {
            name: array
            for name in (
                "q",
                "swa_block_table",
                "seq_lens",
                "compressed_block_table",
                "topk_indices",
                "attn_sink",
            )
            if (array := getattr(inputs, name)) is not None
        }
        caches = [
            cache for cache in (inputs.swa_cache, inputs.compressed_cache) if cache is not None
        ]
        bound = inputs.seq_lens if inputs.seq_lens_bound is None else inputs.seq_lens_bound

        def path(arrays: dict[str, Any], swa: Any, *compressed: Any) -> Any:
            entries = [PagedKV(c, inputs.compressed_page, inputs.kv_format) for c in compressed]
            found = run(
                swa=PagedKV(swa, inputs.swa_page, inputs.kv_format),
                compressed=entries[0] if entries else None,
                query_start_loc=inputs.query_start_loc,
                seq_lens_bound=bound,
                sm_scale=inputs.sm_scale,
                compress_ratio=inputs.compress_ratio,
                window=inputs.window,
                image_spans=inputs.image_spans,
                max_image_tokens=inputs.max_image_tokens,
                max_model_len=inputs.max_model_len,
                max_num_batched_tokens=inputs.max_num_batched_tokens,
                chunk_size=inputs.chunk_size,
                fused=self.fused,
                backend=self.backend,
                validate=False,
                **arrays,
            )
            return found.out, found.max_logits, found.lse

        return compiled_launch(path, (arrays, *caches), self.device, as_result)


def as_result(found: Any) -> V4PrefillResult:
    """(out, max_logits, lse) of JAX as the judge's result."""
    out, max_logits, lse = map(np.asarray, found)
    return V4PrefillResult(out=out, max_logits=max_logits, lse=lse)
