"""Faults that software of this kind has really had, each with its right value in plain sight."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jax_impl import merge_states
from jax_impl.planning import decode_rows, local_seq_lens
from tests.jax_impl.decode.batches import Batch, D, assert_same_bits, constant_batch, numbers
from tests.jax_impl.decode.reference import assert_agrees, reference


def test_a_short_prompt_leaves_ranks_without_keys_empty():
    """vllm-project/vllm#38416: 8 ranks, 3 keys."""
    held = [local_seq_lens([3], dcp_rank=r, dcp_world=8).tolist() for r in range(8)]
    assert held == [[1], [1], [1], [0], [0], [0], [0], [0]]
    batch = constant_batch([[3, 6, 9]], world=8)
    results = [batch.run_rank("xla", rank) for rank in range(8)]
    for empty in results[3:]:
        assert not np.asarray(empty.out, np.float32).any()
        np.testing.assert_array_equal(empty.lse, -np.inf)
    merged = merge_states([r.out for r in results], [r.lse for r in results])
    assert numbers(merged) == [6.0]
    np.testing.assert_allclose(merged.lse, 1.098612, rtol=1e-6)


def test_unfilled_slots_of_the_last_page_may_hold_nan(backend):
    """flashinfer-ai/flashinfer#941: 70 keys on pages of 64, the other 58 slots NaN."""
    batch = constant_batch([[1] * 70], page_size=64)
    result = batch.run_rank(backend)
    assert numbers(result) == [1.0]
    np.testing.assert_allclose(result.lse, 4.248495, rtol=1e-6)


def test_a_nan_among_the_keys_is_not_hidden():
    """The same with slot 3 NaN, which is a key."""
    batch = constant_batch([[1, 1, 1, math.nan] + [1] * 66, [2] * 5], page_size=64)
    result = batch.run_rank("xla")
    assert np.isnan(np.asarray(result.out[0], np.float32)).all()
    assert np.isnan(result.lse[0]).all()
    assert np.asarray(result.out[1], np.float32).tolist() == [[2.0] * 512] * 2


def test_ragged_requests_are_not_viewed_as_uniform():
    """vllm-project/vllm#52500: 9 tokens divide by 3 requests."""
    rows = decode_rows([0, 6, 8, 9], [20, 9, 4], max_query_len=6)
    assert rows.ragged
    assert rows.request.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 2]
    assert rows.bound.tolist() == [15, 16, 17, 18, 19, 20, 8, 9, 4]


def test_rows_of_a_non_causal_block_see_one_another():
    """vllm-project/vllm#54277: 17 keys, 3 tokens."""
    values = [np.arange(17.0)]
    causal = constant_batch(values, [3]).run_rank("xla")
    np.testing.assert_allclose(causal.lse[:, 0], np.log([15, 16, 17]), rtol=1e-6)
    assert numbers(causal) == [7.0, 7.5, 8.0]
    block = constant_batch(values, [3], causal=False).run_rank("xla")
    np.testing.assert_allclose(block.lse[:, 0], np.log([17, 17, 17]), rtol=1e-6)
    assert numbers(block) == [8.0, 8.0, 8.0]


def test_the_tail_of_a_tile_is_masked_without_causality_too():
    """flashinfer-ai/flashinfer#3716: 65 keys in tiles of 128; unmasked, out is 0.507812."""
    result = constant_batch([[1] * 65], causal=False).run_rank("pallas-interpret")
    assert numbers(result) == [1.0]
    np.testing.assert_allclose(result.lse, 4.174387, rtol=1e-6)


def test_padded_rows_are_zero_so_that_an_amax_over_the_batch_is_finite():
    """vllm-project/vllm#57094: 3 real rows and 1 of padding."""
    batch = Batch(total_lens=[9, 5, 7], query_lens=[1, 1, 1], padding=1)
    result = batch.run_rank("xla")
    assert not np.asarray(result.out[3], np.float32).any()
    np.testing.assert_array_equal(result.lse[3], -np.inf)
    assert np.isfinite(np.abs(np.asarray(result.out, np.float32)).max())


def test_the_lse_has_one_base_whatever_the_layout_of_the_queries():
    """flashinfer-ai/flashinfer#4485: the same keys, tokens of one request or of many."""
    many = constant_batch([[1] * 7, [1] * 8], [1, 1]).run_rank("xla")
    one = constant_batch([[1] * 8], [2]).run_rank("xla")
    assert_same_bits(many, one)
    np.testing.assert_allclose(one.lse[:, 0], np.log([7, 8]), rtol=1e-6)


def test_a_block_table_as_wide_as_one_ranks_share_of_another_world_is_refused():
    """vllm-project/vllm#50825: 1000 keys on pages of 64; 8 pages for 2 ranks, 16 for 1."""
    whole = Batch(total_lens=[1000], query_lens=[1], page_size=64)
    half = Batch(total_lens=[1000], query_lens=[1], page_size=64, world=2)
    cache, table = half.cache()
    from jax_impl import dcp_decode

    narrow = table[:, :8]
    assert np.isfinite(np.asarray(dcp_decode(half.q, cache, narrow, half.plan(), 0.1).lse)).all()
    with pytest.raises(ValueError, match=r"1000 keys of request 0, 16 pages of 64; got 8"):
        dcp_decode(whole.q, cache, narrow, whole.plan(), 0.1)


def error_of(wrong, right) -> float:
    return float(np.abs(np.asarray(wrong.out, np.float64) - right.out).max())


def test_bounding_every_row_at_the_length_is_a_large_error():
    batch = Batch(total_lens=[30, 12], query_lens=[8, 2], world=2, sm_scale=0.3)
    right = reference(batch.q, batch.keys, batch.query_lens, 0.3)
    assert_agrees(batch.run("xla"), right)
    batch.causal = False
    assert error_of(batch.run("xla"), right) > 0.2


def test_shortening_local_lengths_by_global_tokens_is_a_large_error():
    """Localised first and expanded then: each rank cuts off its own newest keys."""
    batch = Batch(total_lens=[30], query_lens=[8], world=2, sm_scale=0.3)
    right = reference(batch.q, batch.keys, batch.query_lens, 0.3)
    plans = []
    for rank in range(2):
        held = int(local_seq_lens([30], dcp_rank=rank, dcp_world=2)[0])
        keys = np.maximum(0, held - np.arange(7, -1, -1)).astype(np.int32)
        plan = batch.plan(rank)
        assert (plan.row_keys >= keys).all() and (plan.row_keys > keys).any()
        object.__setattr__(plan, "row_keys", keys)
        plans.append(batch.run_rank("xla", rank, plan=plan))
    wrong = merge_states([r.out for r in plans], [r.lse for r in plans])
    assert error_of(wrong, right) > 0.2


def test_a_large_logit_does_not_overflow(backend):
    """Logits of 1e4 and -1e4: exp of either is out of float32's range."""
    batch = constant_batch([[0, 5, 0]])
    batch.q[..., 0] = 100
    batch.sm_scale = 1.0
    batch.keys[0][:, 0] = np.asarray([-100, 100, 99], batch.keys[0].dtype)
    result = batch.run_rank(backend)
    np.testing.assert_allclose(result.lse, 1e4, rtol=1e-6)
    assert (np.asarray(result.out, np.float32)[..., 1:] == 5).all()


def test_a_nan_query_reaches_exactly_its_own_row_and_no_empty_one(backend):
    """4 tokens, 2 keys: the first two see nothing, whatever their queries hold."""
    batch = Batch(total_lens=[2], query_lens=[4], heads=2)
    batch.q[0] = np.nan
    batch.q[2, 1, 200] = np.nan
    result = batch.run_rank(backend)
    nan = np.zeros((4, 2), bool)
    nan[2, 1] = True
    np.testing.assert_array_equal(np.isnan(result.lse), nan)
    np.testing.assert_array_equal(
        np.isnan(np.asarray(result.out, np.float32)),
        np.broadcast_to(nan[..., None], result.out.shape),
    )
    assert not np.asarray(result.out[:2], np.float32).any()
    np.testing.assert_array_equal(result.lse[:2], -np.inf)


def test_a_nan_key_reaches_the_rows_that_see_it():
    batch = Batch(total_lens=[40], query_lens=[3], heads=2)
    batch.keys[0][38, D - 1] = np.nan  # a rotary column, of the second token's own key
    lse = batch.run_rank("xla").lse
    np.testing.assert_array_equal(np.isnan(lse).all(axis=1), [False, True, True])
    np.testing.assert_array_equal(np.isnan(lse).any(axis=1), [False, True, True])
