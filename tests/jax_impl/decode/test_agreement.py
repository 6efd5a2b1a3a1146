"""Random batches against float64, and the bits that must not depend on the batch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import DecodeCapacity, DecodeResult, dcp_decode, merge_states
from tests.jax_impl.decode.batches import Batch, assert_same_bits
from tests.jax_impl.decode.reference import assert_agrees, reference


def expected(batch: Batch):
    return reference(batch.q, batch.keys, batch.query_lens, batch.sm_scale, causal=batch.causal)


# (lengths, query tokens) that the fix for vllm-project/vllm#59065 was proven on, and more.
FIXED = [
    ([301], [8]),
    ([97], [8]),
    ([130], [4]),
    ([64], [1]),
    ([201, 64], [8, 1]),
    ([301, 97], [8, 2]),
    ([20, 9, 4], [6, 2, 1]),
    ([50, 3, 0, 7], [3, 0, 0, 1]),
    ([8, 3], [8, 3]),  # the first token sees one key
    ([1, 2], [4, 1]),  # bounds below 1
]


@pytest.mark.parametrize(("total_lens", "query_lens"), FIXED, ids=str)
@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (4, 4), (8, 32)])
def test_ranks_merge_to_what_one_rank_computes(total_lens, query_lens, world, interleave):
    absent = [0] * (4 - len(total_lens))
    batch = Batch(
        total_lens=total_lens + absent, query_lens=query_lens + absent, world=world,
        interleave=interleave, padding=12 - sum(query_lens),
        plan_options={"capacity": DecodeCapacity(tokens=12, requests=4, num_ctas=2)},
    )  # fmt: skip
    assert_agrees(batch.run("xla", out_dtype=jnp.float32), expected(batch))


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=str)
def test_xla_agrees_with_float64_for_every_page_size_and_dtype(page_size, dtype):
    batch = Batch(
        total_lens=[150, 40], query_lens=[3, 1], page_size=page_size, dtype=dtype, heads=96
    )
    result = batch.run_rank("xla")
    assert result.out.dtype == jnp.bfloat16
    assert_agrees(result, expected(batch))


KERNEL: dict[str, dict[str, Any]] = {
    # Ragged, padded, an empty request; both ranks; keys split, so that the merge kernel runs.
    "ragged, split, two ranks": dict(
        total_lens=[301, 40, 3, 0], query_lens=[2, 5, 1, 0], world=2, padding=1,
        plan_options={"split_keys": 128},
    ),
    "float8, pages of 64, interleave 4": dict(
        total_lens=[150, 70], query_lens=[3, 1], dtype=jnp.float8_e4m3fn, page_size=64,
        world=2, interleave=4,
    ),
    "128 heads in a cluster, pages of 128": dict(
        total_lens=[200], query_lens=[2], heads=128, page_size=128
    ),
    "float8 in a cluster": dict(
        total_lens=[140], query_lens=[1], heads=96, dtype=jnp.float8_e4m3fn
    ),
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", KERNEL)
def test_the_kernel_agrees_with_float64_under_the_interpreter(shape):
    batch = Batch(**KERNEL[shape])
    assert_agrees(batch.run("pallas-interpret", out_dtype=jnp.float32), expected(batch))


def flattened(batch: Batch) -> Batch:
    """The same rows, each a request of one token with a block-table row of its own."""
    rows = Batch(
        total_lens=[
            total - after
            for total, count in zip(batch.total_lens, batch.query_lens, strict=True)
            for after in reversed(range(count))
        ],
        query_lens=[1] * batch.tokens,
        heads=batch.heads,
        page_size=batch.page_size,
        dtype=batch.dtype,
        plan_options=batch.plan_options,
    )
    rows.q = batch.q
    of_row = [
        keys for keys, count in zip(batch.keys, batch.query_lens, strict=True) for _ in range(count)
    ]
    rows.keys = [keys[:length] for keys, length in zip(of_row, rows.total_lens, strict=True)]
    return rows


@pytest.mark.timeout(120)
def test_multi_token_rows_have_the_bits_of_single_token_rows(backend):
    """With keys cut at the same places; 131 keys: one token sees a key of a third block."""
    batch = Batch(
        total_lens=[131, 66], query_lens=[4, 3], plan_options={"split_keys": 128}, heads=5
    )
    assert_same_bits(batch.run_rank(backend), flattened(batch).run_rank(backend))


def test_a_uniform_batch_has_the_bits_of_its_requests_alone():
    batch = Batch(total_lens=[70, 50], query_lens=[3, 3])
    whole = batch.run_rank("xla")
    for request in range(2):  # of another width of the block table
        alone = Batch(total_lens=[batch.total_lens[request]], query_lens=[3], page_size=64)
        alone.q, alone.keys = batch.q[3 * request :][:3], [batch.keys[request]]
        part = DecodeResult(*(array[3 * request :][:3] for array in whole))
        assert_same_bits(alone.run_rank("xla"), part)


def test_a_group_of_one_rank_has_the_plan_and_the_bits_of_no_group():
    batch = Batch(total_lens=[301, 97, 5], query_lens=[8, 2, 0])
    without = batch.plan(dcp_rank=0, dcp_world=1, interleave=1)
    for interleave in (1, 4, 32):
        one = batch.plan(dcp_rank=0, dcp_world=1, interleave=interleave)
        for a, b in zip(jax.tree.leaves(without), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(a, b)
        assert_same_bits(batch.run_rank("xla", plan=one), batch.run_rank("xla", plan=without))


@pytest.mark.timeout(120)
def test_one_compiled_program_serves_every_plan_of_a_capacity(monkeypatch):
    from jax_impl.decode.kernel_sm90 import launch

    built, counts = [], []
    build = launch.build
    monkeypatch.setattr(
        launch, "build", lambda *arguments: built.append(arguments) or build(*arguments)
    )
    capacity = DecodeCapacity(tokens=4, requests=2, num_ctas=3)
    options = {"capacity": capacity, "max_query_len": 3}
    # JAX's interpreter registers a setting when it first runs, which makes one trace stale.
    for total_lens, query_lens in (([5, 0], [1, 0]), ([260, 20], [3, 1]), ([0, 90], [0, 2])):
        batch = Batch(total_lens=total_lens, query_lens=query_lens, plan_options=options)
        batch.q = np.concatenate([batch.q, batch.q[:1].repeat(4 - batch.tokens, axis=0)])
        cache, table = batch.cache()
        cache = np.concatenate([cache, np.full((32 - len(cache), 32, 576), np.nan, cache.dtype)])
        table = np.pad(table, ((0, 0), (0, 12 - table.shape[1])))
        result = dcp_decode(
            batch.q, cache, table, batch.plan(), batch.sm_scale, backend="pallas-interpret"
        )
        assert_agrees(result, expected(batch))
        counts.append(len(built))
    assert counts[0] >= 1 and counts[1] == counts[2]


def test_jit_takes_the_plan_as_an_argument():
    batch = Batch(total_lens=[40, 9], query_lens=[3, 1], padding=1)

    @jax.jit
    def step(q, cache, table, plan):
        return dcp_decode(q, cache, table, plan, batch.sm_scale, backend="xla")

    plan = jax.device_put(batch.plan())
    assert_same_bits(step(batch.q, *batch.cache(), plan), batch.run_rank("xla"))


def test_scales_multiply_what_is_stored():
    """bmm1 and bmm2 of FlashInfer: kv_scale counts for the logits and for the output."""
    batch = Batch(total_lens=[90], query_lens=[2], dtype=jnp.float8_e4m3fn)
    batch.q = batch.q.astype(jnp.float8_e4m3fn)
    result = batch.run_rank("xla", q_scale=0.5, kv_scale=np.full(1, 4.0, np.float32))
    right = reference(batch.q, batch.keys, batch.query_lens, batch.sm_scale * 0.5 * 4.0)
    assert_agrees(result, right._replace(out=right.out * 4.0, noise=right.noise * 4.0))


@pytest.mark.parametrize(
    ("backend", "sm_scale"), [("xla", -0.05), ("xla", 0.0), ("pallas-interpret", 0.0)]
)
def test_any_finite_scale_is_served(backend, sm_scale):
    batch = Batch(total_lens=[70], query_lens=[2], sm_scale=sm_scale, heads=2)
    assert_agrees(batch.run_rank(backend), expected(batch))


def of_one_number(value: float) -> Batch:
    """Queries and keys that hold nothing but a power of two: every logit is the same."""
    batch = Batch(total_lens=[70], query_lens=[2], heads=2)
    batch.q[:] = value
    batch.keys = [np.full_like(keys, value) for keys in batch.keys]
    return batch


@pytest.mark.parametrize("value", [2.0**57, 2.0**66])
def test_at_scale_0_no_size_of_scores_shows(backend, value):
    """Scores of 2^123, and of 2^141, which no float32 holds. A NaN is no score."""
    batch = of_one_number(value)
    batch.sm_scale = 0.0
    batch.q[1, 0, 5] = np.nan
    result = batch.run_rank(backend)
    np.testing.assert_allclose(result.lse[0], math.log(69), rtol=1e-6)
    np.testing.assert_allclose(result.lse[1], [np.nan, math.log(70)], rtol=1e-6)
    out = np.asarray(result.out, np.float32)
    assert (out[0] == value).all() and (out[1, 1] == value).all()
    assert np.isnan(out[1, 0]).all()


@pytest.mark.parametrize("sm_scale", [1e-37, 1.2e-38, -1e-37])
def test_the_smallest_scales_are_served_as_they_are(backend, sm_scale):
    batch = of_one_number(2.0**57)
    batch.sm_scale = sm_scale
    result = batch.run_rank(backend)
    logit = sm_scale * 576 * 2.0**114
    assert abs(logit) > 0.1
    right = np.log([[69.0] * 2, [70.0] * 2]) + logit
    np.testing.assert_allclose(result.lse, right, rtol=1e-5)


def test_a_product_of_scales_is_taken_whole():
    """sm_scale * q_scale alone is past the largest float32."""
    batch = Batch(total_lens=[90], query_lens=[2])
    batch.sm_scale = 5e17
    result = batch.run_rank("xla", q_scale=1e21, kv_scale=2e-38)
    batch.sm_scale = 10.0
    np.testing.assert_allclose(result.lse, batch.run_rank("xla").lse, rtol=1e-6)


def test_float64_over_any_group_equals_no_group():
    """What the rows' counts say, computed in float64 from the ranks' own keys."""
    from jax_impl.planning import decode_rows, global_position, local_key_counts, local_seq_lens
    from tests.jax_impl.decode.reference import attend_to

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for _ in range(40):
            world, interleave = int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 16]))
            query_lens = rng.integers(0, 7, 3)
            totals = query_lens + rng.integers(0, 60, 3)
            q = rng.standard_normal((18, 2, 576))
            keys = [rng.standard_normal((n, 576)) for n in totals]
            offsets = np.cumsum([0, *query_lens])
            rows = decode_rows(offsets, totals, max_query_len=6, num_rows=len(q))
            outs, lses = [], []
            for rank in range(world):
                group = {"dcp_rank": rank, "dcp_world": world, "interleave": interleave}
                counts = local_key_counts(rows, local_seq_lens(totals, **group), **group)
                out, lse = np.zeros((len(q), 2, 512)), np.full((len(q), 2), -np.inf)
                for row, count in enumerate(counts):
                    if count:
                        mine = keys[rows.request[row]][global_position(np.arange(count), **group)]
                        out[row], lse[row], _ = attend_to(q[row], mine, 0.05)
                outs.append(out)
                lses.append(lse)
            absent = 8 - world  # so that one program serves all
            outs += [np.full_like(outs[0], np.nan)] * absent
            lses += [np.full_like(lses[0], -np.inf)] * absent
            merged = merge_states(outs, lses)
            assert merged.out.dtype == np.float64
            right = reference(q, keys, query_lens, 0.05)
            np.testing.assert_allclose(merged.out, right.out, rtol=0, atol=1e-12)
            np.testing.assert_allclose(merged.lse, right.lse, rtol=0, atol=1e-12)
