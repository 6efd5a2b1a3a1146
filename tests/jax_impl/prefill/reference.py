"""Sparse prefill in NumPy float64, row by row, as the contract writes it down.

It shares nothing with the package under test. Tolerances are what rounding alone explains: the
weights to bfloat16 (2^-9 each, a random walk over the keys), the output to bfloat16, and sums
of exact bfloat16 products in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

D_V = 512
# Numbers below float32's normal range may become 0: the norm of a row of such.
FLUSHED = D_V**0.5 * 2.0**-126


class Expected(NamedTuple):
    out: np.ndarray  # [T, H, 512]
    max_logits: np.ndarray  # [T, H]
    lse: np.ndarray  # [T, H]
    noise: np.ndarray  # [T, H] norm of what rounding the weights may add to out


def reference(q, kv, indices, sm_scale, *, attn_sink=None, topk_length=None) -> Expected:
    q, kv = np.asarray(q, np.float64), np.asarray(kv, np.float64)
    (num_tokens, num_heads, _), topk = q.shape, indices.shape[1]
    out = np.zeros((num_tokens, num_heads, D_V))
    noise = np.zeros((num_tokens, num_heads))
    max_logits = np.full((num_tokens, num_heads), -np.inf)
    lse = np.full((num_tokens, num_heads), np.inf)
    sink = np.full(num_heads, -np.inf) if attn_sink is None else np.asarray(attn_sink, np.float64)
    for t in range(num_tokens):
        row = np.asarray(indices[t], np.int64)
        length = topk if topk_length is None else topk_length[t]
        used = row[(row >= 0) & (row < kv.shape[0]) & (np.arange(topk) < length)]
        if not used.size:
            continue
        keys = kv[used]
        for h in range(num_heads):
            logits = sm_scale * (keys @ q[t, h])
            top = logits.max()
            weights = np.exp(logits - top)
            with np.errstate(over="ignore"):  # a sink far above the logits: the weight is 0
                total = weights.sum() + np.exp(sink[h] - top)
            out[t, h] = weights @ keys[:, :D_V] / total
            max_logits[t, h] = top
            lse[t, h] = top + np.log(weights.sum())
            norms = np.linalg.norm(keys[:, :D_V], axis=1)
            noise[t, h] = np.linalg.norm(weights / total * norms)
    return Expected(out, max_logits, lse, noise)


def assert_agrees(result, expected: Expected, *, statistics_ulps: int = 16) -> None:
    """Special values exactly, everything else within rounding, every (token, head) row."""
    out = np.asarray(result.out, np.float64)
    assert result.out.dtype == jnp.bfloat16
    assert out.shape == expected.out.shape
    empty = np.isposinf(expected.lse)
    assert not out[empty].any()
    error = np.linalg.norm(out - expected.out, axis=-1)
    allowed = 2.0**-8 * (np.linalg.norm(expected.out, axis=-1) + expected.noise) + FLUSHED
    assert (error <= allowed).all(), f"worst row: {np.max(error / np.maximum(allowed, 1e-300))}"
    for name in ("max_logits", "lse"):
        got, right = np.asarray(getattr(result, name)), getattr(expected, name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got[empty], right[empty].astype(np.float32))
        size = np.maximum(1.0, np.abs(right[~empty]))
        error = np.abs(got[~empty] - right[~empty])
        assert (error <= statistics_ulps * 2.0**-23 * size).all(), f"{name}: {error.max()}"
