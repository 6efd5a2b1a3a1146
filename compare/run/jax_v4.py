"""This project's own: jax_impl's V4 prefill path on each of its backends, and its stages by
themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from compare.cases.v4_inputs import V4PrefillInputs
from compare.cases.v4_prefill import V4PrefillCase
from compare.cases.v4_stages import V4StagesCase
from compare.judging.v4_plan import given_plan
from compare.run.implementations import Unsupported
from compare.run.jax_implementations import (
    HEADS,
    INTERPRETER,
    INTERPRETER_BLOCKS,
    KEYS,
    JaxBackend,
    import_jax,
    jax_device,
)
from compare.run.local_v4 import V4Prefill, V4Stages, chunk_stages, plan_chunks
from compare.run.result import V4PrefillResult, V4StagesResult

INTERPRETER_TOKENS = 1024
"""Tokens that the interpreter gathers for one stage."""


class JaxV4Prefill(JaxBackend, V4Prefill):
    """jax_impl.v4_prefill on one backend. fused: attention reads the pages itself."""

    def __init__(self, backend: str, device: str | None = None, *, fused: bool = False) -> None:
        # The interpreter is a CPU program wherever it runs.
        super().__init__(
            fused_name(backend) if fused else backend, "cpu" if backend == INTERPRETER else device
        )
        self.backend = backend
        self.fused = fused

    def warm_up(self) -> None:
        import_jax()
        import jax_impl

        _ = jax_impl.v4_prefill
        jax_device(self.device)

    def refuses(self, case: V4PrefillCase) -> str | None:
        if self.fused and case.format != "v4-fp8":
            return f"format={case.format}: attention without a workspace reads pages of v4-fp8"
        if self.backend != INTERPRETER or case.blocks(KEYS, HEADS) <= INTERPRETER_BLOCKS:
            return None
        return (
            f"the interpreter takes cases of at most {INTERPRETER_BLOCKS} blocks of {KEYS} keys x "
            f"{HEADS} heads"
        )

    def call(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        jax = import_jax()
        from jax_impl import v4_prefill
        from jax_impl.kv_cache import PagedKV
        from jax_impl.planning import PrefillChunk

        run: Any = v4_prefill  # NumPy arrays are as welcome as jax's
        plan = given_plan(inputs)
        for number, chunk in enumerate(plan or ()):
            if chunk.query_start == chunk.query_end:
                raise Unsupported(
                    f"chunk {number} of the plan has no query tokens; jax_impl runs no such plan"
                )
        with jax.default_device(jax_device(self.device)), self.compilation():
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
                plan=None if found.plan is None else plan_chunks(found.plan),
                stages=chunk_stages(found.stages),
            )


class JaxV4Stages(JaxBackend, V4Stages):
    """jax_impl's gather on one backend; with xla its index builders too, which have no other."""

    def __init__(self, backend: str, device: str | None = None) -> None:
        super().__init__(backend, "cpu" if backend == INTERPRETER else device)

    def warm_up(self) -> None:
        import_jax()
        import jax_impl.kv_cache
        import jax_impl.prefill.indices  # noqa: F401

        jax_device(self.device)

    def refuses(self, case: V4StagesCase) -> str | None:
        if case.stage != "gather" and self.name != "xla":
            return f"stage={case.stage} has no kernel: xla computes it on every backend"
        if self.name != INTERPRETER or case.recorded:
            return None
        batch = case.batch()
        requests = range(len(case.seq))
        compressed = case.ratio > 1
        tokens = sum(batch.compressed(i) if compressed else batch.gathered(i) for i in requests)
        if tokens <= INTERPRETER_TOKENS:
            return None
        return f"the interpreter gathers at most {INTERPRETER_TOKENS} tokens; these are {tokens}"

    def call(self, stage: str, arguments: dict[str, Any]) -> V4StagesResult:
        jax = import_jax()
        from jax_impl.kv_cache import PagedKV, gather_kv
        from jax_impl.prefill.indices import combine_topk_swa_indices, global_topk_slots

        given: dict[str, Any] = arguments
        with jax.default_device(jax_device(self.device)), self.compilation():
            if stage == "gather":
                paged = PagedKV(given.pop("cache"), given.pop("page_size"), given.pop("kv_format"))
                found = {"workspace": gather_kv(paged, **given, backend=self.name)}
            elif stage == "combine":
                indices, lengths = combine_topk_swa_indices(**given)
                found = {"indices": indices, "lengths": lengths}
            else:
                slots, lengths = global_topk_slots(**given)
                found = {"slots": slots, "lengths": lengths}
            return V4StagesResult(arrays={name: np.asarray(a) for name, a in found.items()})


def fused_name(backend: str) -> str:
    """The name of a backend's path without a workspace."""
    return "pallas-fused-interpret" if backend == INTERPRETER else f"{backend}-fused"
