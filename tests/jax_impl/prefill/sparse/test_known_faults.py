"""Faults that kernels of this kind have had: the right value of each in plain sight."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.jax_impl.prefill.problems import (
    HEADS,
    ROWS,
    TOKENS,
    assert_same_bits,
    bf16,
    index_rows,
    kv_of_constants,
    run,
    values,
    zero_queries,
)

LN = {count: math.log(count) for count in (2, 3, 128, 133)}


def test_minus_one_inside_the_length_is_a_hole_and_does_not_wrap(backend):
    """sgl-project/sglang#30645."""
    kv = kv_of_constants([*range(ROWS - 1), 1000])
    indices = index_rows([4, 2, -1, -1, 6, -1, -1, -1])
    length = np.full(TOKENS, 8, np.int32)
    result = run(backend, zero_queries(), kv, indices, topk_length=length)
    np.testing.assert_array_equal(values(result)[0], 4.0)
    np.testing.assert_allclose(result.lse[0], LN[3], rtol=1e-6)


def test_slots_past_the_length_are_not_attended(backend):
    """vllm-project/vllm#36616: padding that looks like row 0."""
    padded = [7, 3] + [0] * 126
    indices = index_rows(padded, padded, padded)
    length = np.asarray([2, 0, 128, 0], np.int32)
    result = run(backend, zero_queries(), kv_of_constants(), indices, topk_length=length)
    np.testing.assert_array_equal(values(result)[:3, 0], [5.0, 0.0, 0.078125])
    np.testing.assert_allclose(result.lse[:3, 0], [LN[2], math.inf, LN[128]], rtol=1e-6)
    np.testing.assert_array_equal(result.max_logits[:3, 0], [0.0, -math.inf, 0.0])


@pytest.mark.parametrize("width", [133, 192, 256])
def test_any_width_of_the_index_list_gives_the_same_result(backend, width):
    """flashinfer-ai/flashinfer#4380: 133 is no multiple of any tile."""
    indices = index_rows(np.arange(133), topk=width)
    result = run(backend, zero_queries(), kv_of_constants(np.ones(ROWS)), indices)
    np.testing.assert_array_equal(values(result)[0], 1.0)
    np.testing.assert_allclose(result.lse[0], LN[133], rtol=1e-6)


def test_a_sink_far_above_or_below_the_logits_stays_finite(backend):
    """NVIDIA/TensorRT-LLM#19220: one key with logit -50, then none at all."""
    q = zero_queries(heads=4)
    q[..., 0] = 1
    kv = kv_of_constants()
    kv[0] = 6
    indices = index_rows([0])
    # q . key = 6, so that the logit is -50.
    sink = np.asarray([200.0, -200.0, -np.inf, np.inf], np.float32)
    result = run(backend, q, kv, indices, -50 / 6, attn_sink=sink)
    np.testing.assert_array_equal(values(result)[0], [0.0, 6.0, 6.0, 0.0])
    np.testing.assert_allclose(result.lse[0], -50.0, rtol=1e-6)
    np.testing.assert_allclose(result.max_logits[0], -50.0, rtol=1e-6)

    result = run(backend, q, kv, indices, -50 / 6, attn_sink=np.full(4, 2, np.float32))
    np.testing.assert_array_equal(values(result)[1], 0.0)
    np.testing.assert_array_equal(result.lse[1], math.inf)


def test_statistics_are_in_scaled_logits_for_any_sign_of_the_scale(backend):
    """NVIDIA/TensorRT-LLM#19112: raw dots 32 and 32, and 32 and 0."""
    q = zero_queries()
    q[..., 0] = 1
    kv = bf16(np.zeros((ROWS, 512)))
    kv[:2, 0] = 32
    indices = index_rows([0, 1], [0, 2])
    by_scale = {scale: run(backend, q, kv, indices, scale) for scale in (0.125, 0.0, -0.125)}
    np.testing.assert_array_equal(by_scale[0.125].max_logits[0], 4.0)
    np.testing.assert_allclose(by_scale[0.125].lse[0], 4.693147, rtol=1e-6)
    np.testing.assert_array_equal(by_scale[0.0].max_logits[:2], 0.0)
    np.testing.assert_allclose(by_scale[0.0].lse[:2], LN[2], rtol=1e-6)
    np.testing.assert_array_equal(by_scale[-0.125].max_logits[1], 0.0)
    np.testing.assert_allclose(by_scale[-0.125].lse[1], 0.018150, atol=5e-7)


def test_the_sink_enlarges_the_denominator(backend):
    """vllm-project/vllm#54568: one key of logit 0 and value 8 against a sink of ln 3."""
    kv = kv_of_constants(np.full(ROWS, 8))
    sink = np.full(HEADS, LN[3], np.float32)
    result = run(backend, zero_queries(), kv, index_rows([5]), attn_sink=sink)
    np.testing.assert_array_equal(values(result)[0], 2.0)
    np.testing.assert_array_equal(result.lse[0], 0.0)


def test_a_negative_index_does_not_name_the_last_row(backend):
    """jax-ml/jax#10063."""
    indices = index_rows([-1, 2, ROWS])
    kv = kv_of_constants()
    kv[-1] = 1000
    result = run(backend, zero_queries(), kv, indices)
    np.testing.assert_array_equal(values(result)[0], 2.0)
    np.testing.assert_array_equal(result.lse[0], 0.0)


def test_an_index_that_occurs_twice_counts_twice(backend):
    kv = kv_of_constants()
    kv[5] = 6
    result = run(backend, zero_queries(), kv, index_rows([3, 3, 5]))
    np.testing.assert_array_equal(values(result)[0], 4.0)
    np.testing.assert_allclose(result.lse[0], LN[3], rtol=1e-6)


@pytest.mark.parametrize("heads", [16, 8])
def test_padded_heads_do_not_reach_the_others(backend, heads):
    """vllm-project/vllm#42956: the caller's own padding to 64 heads is NaN, ours is zero."""
    rng = np.random.default_rng(0)
    q = bf16(rng.standard_normal((TOKENS, heads, 512)))
    kv = bf16(rng.standard_normal((ROWS, 512)))
    indices = rng.integers(0, ROWS, (TOKENS, 128)).astype(np.int32)
    sink = rng.standard_normal(heads).astype(np.float32)
    padded_q = np.concatenate([q, np.full((TOKENS, 64 - heads, 512), np.nan, q.dtype)], axis=1)
    padded_sink = np.concatenate([sink, np.full(64 - heads, np.nan, np.float32)])

    alone = run(backend, q, kv, indices, 0.1, attn_sink=sink)
    assert alone.out.shape == (TOKENS, heads, 512)
    assert np.isfinite(np.asarray(alone.out, np.float32)).all()
    padded = run(backend, padded_q, kv, indices, 0.1, attn_sink=padded_sink)
    assert_same_bits(alone, type(padded)(*(x[:, :heads] for x in padded)))
