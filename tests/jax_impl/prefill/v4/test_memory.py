"""What a chunk, and a whole batch, need beside arguments and results; XLA is asked."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import SparsePrefillResult, kv_cache, v4_prefill
from jax_impl.kv_cache import FORMATS, PagedKV
from jax_impl.kv_cache.xla import BLOCK_ROWS
from jax_impl.planning import PrefillChunk, plan_prefill_chunks
from jax_impl.prefill.indices import combined_width
from jax_impl.prefill.v4 import api
from jax_impl.prefill.v4.chunk import Way, attend_chunk
from tests.jax_impl.prefill.v4.batches import problem

D, HEADS, TOPK, RATIO, PAGE = 512, 64, 512, 4, 64
MIB = 2**20
ROW = D * 2  # of the workspace, bytes


def beside(width: int) -> int:
    """Bytes that "xla" on a CPU needs at most beside workspace and lists, whatever the batch.

    Attention goes token by token and 64 heads at a time: the keys of one token in bfloat16 and
    float32; its queries and weighted values; logits, weights and rounded weights. The gather goes
    by blocks of rows: read, dequantised and the workspace's own, at most float32 each.
    """
    keys = width * D * (2 + 4)
    token = 3 * HEADS * D * 4 + 4 * HEADS * width * 4
    gather = 3 * BLOCK_ROWS * D * 4
    return keys + token + gather + MIB // 8  # and vectors of one number for each token or request


def paged(kv_format: str, page_size: int, pages: int) -> PagedKV:
    """A cache of shapes alone."""
    layout = FORMATS[kv_format]
    dtype = jnp.uint8 if layout.is_bytes else jnp.bfloat16
    like = kv_cache.empty_cache(kv_format, num_pages=1, page_size=page_size)
    shape = jax.ShapeDtypeStruct(layout.cache_shape(pages, page_size), dtype)
    return jax.tree.map(lambda _: shape, like)


def compiled(seq_lens: list[int], query_lens: list[int], kv_format: str, **engine: Any) -> Any:
    """XLA's analysis of v4_prefill on a CPU, from shapes alone: nothing runs."""
    tokens, columns = sum(query_lens), -(-max(seq_lens) // PAGE)
    pages = len(seq_lens) * columns
    shapes = {
        "q": jax.ShapeDtypeStruct((tokens, HEADS, D), jnp.bfloat16),
        "swa": paged(kv_format, PAGE, pages),
        "swa_block_table": jax.ShapeDtypeStruct((len(seq_lens), columns), jnp.int32),
        "compressed": paged(kv_format, PAGE, pages // RATIO + len(seq_lens)),
        "compressed_block_table": jax.ShapeDtypeStruct((len(seq_lens), columns), jnp.int32),
        "topk_indices": jax.ShapeDtypeStruct((tokens, TOPK), jnp.int32),
        "seq_lens": jax.ShapeDtypeStruct((len(seq_lens),), jnp.int32),
        "attn_sink": jax.ShapeDtypeStruct((HEADS,), jnp.float32),
    }
    known = {
        "query_start_loc": np.cumsum([0, *query_lens]).astype(np.int32),
        "seq_lens_bound": np.asarray(seq_lens, np.int32),
        "sm_scale": D**-0.5,
        "compress_ratio": RATIO,
        "backend": "xla",
        **engine,
    }
    run = jax.jit(lambda arrays: v4_prefill(**arrays, **known))
    return run.lower(shapes).compile().memory_analysis()


def planned(seq_lens: list[int], query_lens: list[int], **engine: Any) -> Any:
    return plan_prefill_chunks(seq_lens, query_lens, compress_ratio=RATIO, **engine)


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("kv_format", ["v4-fp8", "bf16"])
def test_a_chunk_needs_its_workspace_and_its_lists(kv_format):
    """36 MiB of workspace: neither a second one for the second gather, nor a cache dequantised."""
    seq_lens, query_lens = [32000, 30000, 9, 26000], [900, 300, 9, 1000]
    engine = {"max_model_len": 32768, "max_num_batched_tokens": 4096}
    (chunk,) = planned(seq_lens, query_lens, **engine)
    workspace = 4 * chunk.workspace_rows * ROW
    width = combined_width(TOPK, 128)
    lists = sum(query_lens) * width * 4
    assert workspace > 35 * MIB
    temporary = compiled(seq_lens, query_lens, kv_format, **engine).temp_size_in_bytes
    assert workspace <= temporary <= workspace + lists + beside(width)


@pytest.mark.usefixtures("compiled")
def test_chunks_run_one_after_another(monkeypatch):
    """When a chunk's program is started there is nothing beside the arguments but the results, and
    it hands back the same memory: of the chunks before it their rows are left, and nothing else.
    """
    batch = problem([20, 300, 200, 40], [20, 30, 9, 40], heads=HEADS, chunk_size=8)
    arguments = {**batch.arguments, "q": jnp.asarray(batch.arguments["q"])}
    small = 2**16  # offsets and tables
    result_bytes = batch.arguments["q"].nbytes + 2 * 99 * HEADS * 4
    counted = []

    def counting(arrays: Any, whole: SparsePrefillResult, **settings: Any) -> Any:
        gc.collect()
        counted.append(live_bytes() - before)
        assert arrays.q is arguments["q"]
        places = [array.unsafe_buffer_pointer() for array in whole]
        result, stage = attend_chunk(arrays, whole, **settings)
        assert [array.unsafe_buffer_pointer() for array in result] == places
        return result, stage

    monkeypatch.setattr(api, "COMPILED", Way(counting, None))
    plan = [
        PrefillChunk(i, i + 1, seq // 4, seq // 4 + min(seq, query + 7), start, start + query)
        for i, (seq, query, start) in enumerate([(20, 20, 0), (300, 30, 20), (200, 9, 50),
                                                 (40, 40, 59)])
    ]  # fmt: skip
    gc.collect()
    before = live_bytes()
    v4_prefill(**arguments, plan=plan, backend="xla")
    assert len(counted) == 4
    assert all(result_bytes <= live <= result_bytes + small for live in counted)


def test_fused_needs_no_workspace():
    seq_lens, query_lens = [60000, 70000, 65000], [800, 700, 900]
    engine = {"max_model_len": 70000, "max_num_batched_tokens": 2400, "fused": True}
    width = combined_width(TOPK, 128)
    lists = sum(query_lens) * width * 4
    temporary = compiled(seq_lens, query_lens, "v4-fp8", **engine).temp_size_in_bytes
    # On a CPU XLA writes a list in two passes.
    assert temporary <= 2 * lists + beside(width)
