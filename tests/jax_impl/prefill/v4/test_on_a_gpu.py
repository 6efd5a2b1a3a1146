"""What only the GPU can show of the V4 path: the kernels at their real sizes, and device memory."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl.prefill.v4 import chunk
from tests.jax_impl.prefill.problems import assert_same_bits
from tests.jax_impl.prefill.reference import assert_agrees
from tests.jax_impl.prefill.v4.batches import Problem, numpy_of, problem
from tests.jax_impl.prefill.v4.test_plans import chunks
from tests.jax_impl.prefill.v4.test_prefill import assert_same, statistics

pytestmark = pytest.mark.gpu

BACKEND = "pallas"
ROOT = Path(__file__).parents[3]

# Without tokens at the beginning, between others and at the end; short, from its beginning; long;
# crossing the window, at positions 126 to 129; and over the ends of several pages of 64.
SEQ_LENS = [500, 60, 1000, 130, 200, 700, 64]
QUERY_LENS = [0, 60, 70, 4, 0, 150, 0]
WITH_TOKENS = (1, 2, 3, 5)
# Chunks, and the rows that they have to spare in N and in M.
PLANS = {
    "one request a chunk": ([(1, 2), (2, 3), (3, 4), (5, 6)], 0),
    "cut before the request without tokens": ([(1, 4), (5, 6)], 3),
    "cut behind it": ([(1, 5), (5, 6)], 0),
    "all requests": ([(0, 7)], 3),
}
LAYERS: dict[int, dict[str, Any]] = {
    4: {"topk": 192, "compressed_page_size": 64},
    128: {"topk": 0, "compressed_page_size": 2},
}

heads_and_ratios = pytest.mark.parametrize(("heads", "ratio"), [(64, 4), (128, 128)])


@functools.cache
def mixed(heads: int, ratio: int) -> Problem:
    return problem(
        SEQ_LENS, QUERY_LENS, kv_format="v4-fp8", window=128, page_size=64, heads=heads,
        ratio=ratio, max_model_len=1024, max_num_batched_tokens=512, chunk_size=8, **LAYERS[ratio],
    )  # fmt: skip


@functools.cache
def mixed_result(heads: int, ratio: int) -> Any:
    result = numpy_of(mixed(heads, ratio).run(BACKEND))
    assert [(chunk.start, chunk.end) for chunk in result.plan] == [(1, 6)]
    return result


@heads_and_ratios
def test_every_token_attends_to_its_keys(heads, ratio):
    assert_agrees(mixed_result(heads, ratio), mixed(heads, ratio).expected())


@heads_and_ratios
def test_a_request_alone_gives_the_bits_that_it_gives_in_the_batch(heads, ratio):
    batch = mixed(heads, ratio)
    offsets = batch.batch.query_start_loc - batch.batch.query_start_loc[0]
    for request in WITH_TOKENS:
        tokens = slice(offsets[request], offsets[request + 1])
        mine = [each[tokens] for each in statistics(mixed_result(heads, ratio))]
        for fused in (False, True):
            alone = numpy_of(batch.run(BACKEND, fused=fused, **batch.alone(request)))
            assert_same_bits(statistics(alone), mine)  # type: ignore[arg-type]


@heads_and_ratios
@pytest.mark.parametrize("name", PLANS)
def test_every_legal_plan_gives_the_same_bits(heads, ratio, name):
    batch, (ranges, spare) = mixed(heads, ratio), PLANS[name]
    plan = chunks(batch.batch, ranges, spare=spare)
    assert_same(batch.run(BACKEND, plan=plan), mixed_result(heads, ratio))


@heads_and_ratios
@pytest.mark.parametrize("name", [None, *PLANS])
def test_fused_gives_the_bits_of_gathering_first(heads, ratio, name):
    batch = mixed(heads, ratio)
    plan = None if name is None else chunks(batch.batch, PLANS[name][0])
    assert_same(batch.run(BACKEND, fused=True, plan=plan), mixed_result(heads, ratio))


@heads_and_ratios
def test_repeats_have_the_same_bits(heads, ratio):
    for _ in range(20):
        for fused in (False, True):
            again = mixed(heads, ratio).run(BACKEND, fused=fused)
            assert_same(again, mixed_result(heads, ratio))


@heads_and_ratios
def test_what_a_workspace_held_before_never_comes_through(monkeypatch, heads, ratio):
    """Every row that nothing was gathered into is NaN, and each request has such rows."""

    def full_of_nan(rows: jax.ShapeDtypeStruct) -> Any:
        return jax.new_ref(jax.numpy.full(rows.shape, np.nan, rows.dtype))

    batch, expected = mixed(heads, ratio), mixed_result(heads, ratio)
    program: Any = chunk.attend_chunk
    plan = chunks(batch.batch, [(1, 6)], spare=3)
    monkeypatch.setattr(chunk, "_empty_workspace", full_of_nan)
    program.clear_cache()
    try:
        result = numpy_of(batch.run(BACKEND, plan=plan, keep_stages=True))
    finally:
        program.clear_cache()
    stale = np.isnan(result.stages[0].workspace.astype(np.float32)).all(axis=2)
    assert stale.any(axis=1).all()
    assert_same(result, expected)


# A device's peak never falls, so each way has a process that calls the path once.
CHILD = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import ml_dtypes
from jax_impl import v4_prefill
from jax_impl.kv_cache import empty_cache
from jax_impl.planning import PrefillChunk, plan_prefill_chunks
from jax_impl.prefill.indices import combined_width

size, heads, way = json.loads(sys.argv[1])
n, tokens, context, ratio, topk = size
backend = sys.argv[2]
entries, window = context // ratio, tokens + 127
engine = {"max_model_len": context, "max_num_batched_tokens": n * tokens}
lens, queries = [context] * n, [tokens] * n
(whole,) = plan_prefill_chunks(lens, queries, compress_ratio=ratio, **engine)
plan = (whole,)
if way == "two chunks":
    half = n // 2
    plan = tuple(
        PrefillChunk(i, i + half, whole.compressed_rows, whole.workspace_rows, i * tokens,
                     (i + half) * tokens)
        for i in (0, half)
    )
columns = {"swa": -(-context // 64), "compressed": -(-entries // 64)}
chosen = np.tile(np.arange(topk, dtype=np.int32), (n * tokens, 1))
arguments = {
    "q": jnp.asarray(np.zeros((n * tokens, heads, 512), ml_dtypes.bfloat16)),
    "topk_indices": jnp.asarray(chosen),
    "seq_lens": jnp.asarray(np.array(lens, np.int32)),
}
for name, wide in columns.items():
    arguments[name] = empty_cache("v4-fp8", num_pages=n * wide, page_size=64)
    table = np.arange(n * wide, dtype=np.int32).reshape(n, wide)
    arguments[name + "_block_table"] = jnp.asarray(table)
arguments = jax.block_until_ready(arguments)
(device,) = arguments["q"].devices()
before = device.memory_stats() or {}
result = v4_prefill(
    **arguments, query_start_loc=np.arange(n + 1, dtype=np.int32) * tokens, sm_scale=0.04,
    compress_ratio=ratio, backend=backend, fused=way == "fused",
    plan=plan if way == "two chunks" else None, **engine,
)
jax.block_until_ready((result.out, result.max_logits, result.lse))
after = device.memory_stats() or {}
largest = max((chunk.end - chunk.start) * chunk.workspace_rows for chunk in plan)
listed = max(chunk.query_end - chunk.query_start for chunk in plan)
print(json.dumps({
    "in_use": before.get("bytes_in_use"),
    "peak_before": before.get("peak_bytes_in_use"),
    "peak": after.get("peak_bytes_in_use"),
    "workspace": 0 if way == "fused" else largest * 1024,
    "lists": listed * (combined_width(topk, 128) + 1) * 4,
    "result": n * tokens * heads * (512 * 2 + 8),
}))
"""

SIZE = (4, 1024, 65536, 4, 512)  # 70 MiB of workspace, 10 MiB of lists
SMALL = 2**18
"""Bytes for what has a number for each token, request or thread block: eight int32 of each of the
4096 tokens are half of it. A second copy of the workspace, or of the lists, is more."""


def memory(heads: int, way: str) -> dict[str, Any]:
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([SIZE, heads, way]), BACKEND],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


WAYS = [(heads, way) for heads in (64, 128) for way in ("one chunk", "two chunks", "fused")]


@functools.cache
def memories() -> dict[tuple[int, str], Future[dict[str, Any]]]:
    """All at once: a process's numbers are its own allocator's."""
    with ThreadPoolExecutor(len(WAYS)) as pool:
        return {way: pool.submit(memory, *way) for way in WAYS}


@pytest.mark.parametrize(("heads", "way"), WAYS)
def test_the_peak_is_the_planned_workspace_lists_and_results(heads, way):
    found = memories()[heads, way].result()
    needed = sum(found[name] for name in ("workspace", "lists", "result"))
    used = found["peak"] - found["in_use"]
    assert found["peak_before"] - found["in_use"] < found["result"]  # else it would hide the path's
    assert found["result"] <= used <= needed + SMALL, found
