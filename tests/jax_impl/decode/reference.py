"""Causal decode in NumPy float64, row by row, as the contract writes it down.

It knows nothing of ranks, pages or plans, and shares nothing with the package under test.
Tolerances are what rounding alone explains: the weights to bfloat16 (2^-9 each, a random walk
over the keys), the output to its dtype, and sums of exact products in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

D_V = 512


class Expected(NamedTuple):
    out: np.ndarray  # [T, H, 512]
    lse: np.ndarray  # [T, H]
    noise: np.ndarray  # [T, H] norm of what rounding the weights may add to out


def attend_to(q, keys, sm_scale) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All heads of one token over its keys [n, 576], n >= 1: out, lse, noise."""
    keys = np.asarray(keys, np.float64)
    logits = sm_scale * (np.asarray(q, np.float64) @ keys.T)
    top = logits.max(axis=1)
    weights = np.exp(logits - top[:, None])
    total = weights.sum(axis=1)
    out = weights @ keys[:, :D_V] / total[:, None]
    norms = np.linalg.norm(keys[:, :D_V], axis=1)
    noise = np.linalg.norm(weights / total[:, None] * norms, axis=1)
    return out, top + np.log(total), noise


def reference(q, keys, query_lens, sm_scale, *, causal=True) -> Expected:
    """keys: [T_b, 576] of each request, in global order; rows of q past the last one: padding."""
    rows, heads, _ = q.shape
    out, noise = np.zeros((rows, heads, D_V)), np.zeros((rows, heads))
    lse = np.full((rows, heads), -np.inf)
    row = 0
    for of_request, count in zip(keys, query_lens, strict=True):
        for after in reversed(range(count)):
            visible = len(of_request) - (after if causal else 0)
            if visible > 0:
                out[row], lse[row], noise[row] = attend_to(q[row], of_request[:visible], sm_scale)
            row += 1
    return Expected(out, lse, noise)


def assert_agrees(result, expected: Expected, *, lse_ulps: int = 32) -> None:
    """Special values exactly, everything else within rounding, every (token, head) row."""
    out, lse = np.asarray(result.out, np.float64), np.asarray(result.lse)
    assert out.shape == expected.out.shape
    assert lse.dtype == np.float32
    empty = np.isneginf(expected.lse)
    assert not out[empty].any()
    np.testing.assert_array_equal(lse[empty], -np.inf)
    error = np.linalg.norm(out - expected.out, axis=-1)
    rounding = 2.0**-8 if result.out.dtype == jnp.bfloat16 else 2.0**-18
    allowed = rounding * np.linalg.norm(expected.out, axis=-1) + 2.0**-8 * expected.noise
    assert (error <= allowed).all(), f"worst row: {np.max(error / np.maximum(allowed, 1e-300))}"
    size = np.maximum(1.0, np.abs(expected.lse[~empty]))
    error = np.abs(lse[~empty] - expected.lse[~empty]) / (2.0**-23 * size)
    assert (error <= lse_ulps).all(), f"lse: {error.max()} ulps"
