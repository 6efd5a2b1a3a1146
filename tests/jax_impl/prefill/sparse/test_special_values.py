"""Rows without keys, NaN, sinks at the ends of the range, and logits as large as they get."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.jax_impl.prefill.problems import (
    HEADS,
    ROWS,
    TOKENS,
    TOPK,
    assert_same_bits,
    bf16,
    index_rows,
    kv_of_constants,
    random_problem,
    run,
    values,
    zero_queries,
)
from tests.jax_impl.prefill.reference import assert_agrees, reference

FILLERS = (-(2**31), -123456, -1, ROWS, 114514, 1919810, 2147480000, 2**31 - 1)


def assert_empty(result, token: int) -> None:
    assert not np.asarray(result.out[token], np.float32).any()
    np.testing.assert_array_equal(result.max_logits[token], -math.inf)
    np.testing.assert_array_equal(result.lse[token], math.inf)


@pytest.mark.parametrize("sink", [None, 0.0, math.inf, -math.inf, math.nan])
def test_a_token_of_holes_is_empty_whatever_the_sink(backend, sink):
    q, kv, indices, scale = random_problem(1)
    indices[1] = np.resize(FILLERS, TOPK)
    sinks = None if sink is None else np.full(HEADS, sink, np.float32)
    assert_empty(run(backend, q, kv, indices, scale, attn_sink=sinks), token=1)


def test_a_token_of_holes_is_empty_even_if_its_query_is_nan(backend):
    q, kv, indices, scale = random_problem(2)
    q[1] = np.nan
    q[2] = np.inf
    indices[1:3] = -1
    result = run(backend, q, kv, indices, scale)
    assert_empty(result, token=1)
    assert_empty(result, token=2)
    assert np.isfinite(np.asarray(result.out, np.float32)).all()


@pytest.mark.parametrize("lengths", [(0, 1, 63, 64), (65, 127, 128, 5)])
def test_only_slots_before_the_length_count(backend, lengths):
    q, kv, indices, scale = random_problem(3)
    length = np.asarray(lengths, np.int32)
    result = run(backend, q, kv, indices, scale, topk_length=length)
    assert_agrees(result, reference(q, kv, indices, scale, topk_length=length))


def test_a_length_that_covers_only_holes_is_an_empty_token(backend):
    q, kv, indices, scale = random_problem(4)
    indices[:, :70] = -1
    length = np.asarray([70, 1, 64, 128], np.int32)
    result = run(backend, q, kv, indices, scale, topk_length=length)
    for token in range(3):
        assert_empty(result, token)
    assert_agrees(result, reference(q, kv, indices, scale, topk_length=length))


def test_holes_may_stand_anywhere_in_a_row(backend):
    q, kv, indices, scale = random_problem(5, topk=256)
    indices[0, :64] = -1  # the first block
    indices[1, 64:128] = -1  # a block in the middle
    indices[2, ::2] = FILLERS[0]
    indices[3, :255] = FILLERS[-1]
    indices[3, 255] = 7
    assert_agrees(run(backend, q, kv, indices, scale), reference(q, kv, indices, scale))


@pytest.mark.parametrize("sink", [-math.inf, 0.0, 80.0, -80.0, 1e4, math.inf])
def test_the_sink_changes_the_output_alone(backend, sink):
    q, kv, indices, scale = random_problem(6)
    sinks = np.full(HEADS, sink, np.float32)
    without = run(backend, q, kv, indices, scale)
    result = run(backend, q, kv, indices, scale, attn_sink=sinks)
    np.testing.assert_array_equal(result.lse, without.lse)
    np.testing.assert_array_equal(result.max_logits, without.max_logits)
    assert_agrees(result, reference(q, kv, indices, scale, attn_sink=sinks))
    if sink == -math.inf:
        assert_same_bits(result, without)
    if sink == math.inf:
        assert not np.asarray(result.out, np.float32).any()


def test_a_nan_sink_makes_its_own_head_nan_and_nothing_else(backend):
    q, kv, indices, scale = random_problem(7)
    indices[3] = -1
    sinks = np.asarray([0.5, np.nan, -np.inf], np.float32)
    result = run(backend, q, kv, indices, scale, attn_sink=sinks)
    nan = np.isnan(np.asarray(result.out, np.float32))
    assert nan[:3, 1].all()
    assert not nan[:, [0, 2]].any()
    assert_empty(result, token=3)
    assert np.isfinite(result.lse[:3]).all()


def test_nan_rows_that_no_slot_names_do_not_leak(backend):
    q, kv, indices, scale = random_problem(8)
    length = np.asarray([100, 128, 40, 0], np.int32)
    indices[indices == 0] = -1  # row 0 is where a hole might be read from
    clean = reference(q, kv, indices, scale, topk_length=length)
    named = np.concatenate([indices[t, : length[t]] for t in range(TOKENS)])
    unnamed = np.setdiff1d(np.arange(ROWS), named)
    assert 0 in unnamed and len(unnamed) > 10
    kv[unnamed] = np.nan
    assert_agrees(run(backend, q, kv, indices, scale, topk_length=length), clean)


@pytest.mark.parametrize("column", [0, 300, 511])
def test_a_nan_key_reaches_exactly_the_tokens_that_name_it(backend, column):
    q, kv, indices, scale = random_problem(9)
    indices[indices == 17] = 18
    indices[2, 77] = 17
    kv[17, column] = np.nan
    result = run(backend, q, kv, indices, scale)
    nan_out = np.isnan(np.asarray(result.out, np.float32)).any(axis=-1)
    np.testing.assert_array_equal(nan_out, np.isnan(result.lse))
    np.testing.assert_array_equal(np.isnan(result.lse).all(axis=1), [False, False, True, False])
    np.testing.assert_array_equal(np.isnan(result.lse).any(axis=1), [False, False, True, False])


def test_a_nan_query_reaches_exactly_its_own_row(backend):
    q, kv, indices, scale = random_problem(10)
    q[1, 2, 200] = np.nan
    result = run(backend, q, kv, indices, scale)
    expected = np.zeros((TOKENS, HEADS), bool)
    expected[1, 2] = True
    np.testing.assert_array_equal(np.isnan(result.lse), expected)
    np.testing.assert_array_equal(
        np.isnan(np.asarray(result.out, np.float32)),
        np.broadcast_to(expected[..., None], result.out.shape),
    )


def test_huge_logits_pick_one_key_without_overflow(backend):
    """Logits of 1e4 and -1e4: exp of either is out of float32's range."""
    q = zero_queries()
    q[..., 0] = 100
    kv = kv_of_constants()
    kv[:, 0] = np.where(np.arange(ROWS) == 9, 100, -100)
    indices = index_rows(np.arange(20), np.arange(10, 40), [9], [9, 9])
    result = run(backend, q, kv, indices)
    out = np.asarray(result.out, np.float32)
    np.testing.assert_array_equal(out[[0, 2, 3], :, 1:], 9.0)
    np.testing.assert_array_equal(out[1, :, 1:], 24.5)
    np.testing.assert_allclose(result.max_logits[:, 0], [1e4, -1e4, 1e4, 1e4], rtol=1e-6)
    expected = np.asarray([1e4, -1e4 + math.log(30), 1e4, 1e4 + math.log(2)], np.float32)
    np.testing.assert_allclose(result.lse[:, 0], expected, rtol=1e-6)


def test_one_kv_row_and_no_kv_row(backend):
    q, kv, _, scale = random_problem(11)
    indices = index_rows([0], [0, 0, 1], [1], [-1])
    result = run(backend, q, kv[:1], indices, scale)
    assert_agrees(result, reference(q, kv[:1], indices, scale))
    result = run(backend, q, kv[:0], indices, scale)
    for token in range(TOKENS):
        assert_empty(result, token)


def test_the_order_of_the_indices_changes_rounding_at_most(backend):
    q, kv, indices, scale = random_problem(12)
    shuffled = np.random.default_rng(0).permuted(indices, axis=1)
    expected = reference(q, kv, indices, scale)
    assert_agrees(run(backend, q, kv, indices, scale), expected)
    assert_agrees(run(backend, q, kv, shuffled, scale), expected)


def test_rope_columns_take_part_in_the_scores_only(backend):
    q, kv, indices, scale = random_problem(13, d=576)
    result = run(backend, q, kv, indices, scale)
    expected = reference(q, kv, indices, scale)
    assert_agrees(result, expected)
    without = reference(q[..., :512], kv[:, :512], indices, scale)
    assert np.abs(expected.lse - without.lse).min() > 1e-3


@pytest.mark.parametrize("scale", [0.0, -0.07])
def test_scales_of_zero_and_below(backend, scale):
    q, kv, indices, _ = random_problem(14)
    assert_agrees(run(backend, q, kv, indices, scale), reference(q, kv, indices, scale))


def test_a_bf16_output_of_constants_is_exact(backend):
    result = run(backend, zero_queries(), bf16(np.ones((ROWS, 512))), index_rows(range(100)))
    np.testing.assert_array_equal(values(result)[0], 1.0)
