"""Inputs for the tests, few distinct shapes: every new one is compiled anew."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import SparsePrefillResult, sparse_prefill

CPU_BACKENDS = ("xla", "pallas-interpret")

# The shape of every test that doesn't ask for another.
TOKENS, HEADS, D, ROWS, TOPK = 4, 3, 512, 300, 128


def bf16(array: Any) -> np.ndarray:
    return np.asarray(array, jnp.bfloat16)


def kv_of_constants(values: Any = None, d: int = D) -> np.ndarray:
    """KV rows whose first 512 columns all equal a value; by default the row's number."""
    values = np.arange(ROWS) if values is None else np.asarray(values, np.float64)
    return bf16(np.repeat(values[:, None], d, axis=1))


def index_rows(*rows: Any, tokens: int = TOKENS, topk: int = TOPK) -> np.ndarray:
    """Lists of indices, one a token, filled up with -1."""
    indices = np.full((tokens, topk), -1, np.int32)
    for token, row in enumerate(rows):
        indices[token, : len(row)] = row
    return indices


def zero_queries(tokens: int = TOKENS, heads: int = HEADS, d: int = D) -> np.ndarray:
    """Every valid key then has logit 0: out is the mean value, lse ln(count)."""
    return bf16(np.zeros((tokens, heads, d)))


def random_problem(
    seed: int,
    *,
    tokens: int = TOKENS,
    heads: int = HEADS,
    d: int = D,
    rows: int = ROWS,
    topk: int = TOPK,
    logit_spread: float = 2.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """q, kv, indices (about one hole in eight, duplicates among the rest), sm_scale."""
    rng = np.random.default_rng(seed)
    q = bf16(rng.standard_normal((tokens, heads, d)))
    kv = bf16(rng.standard_normal((rows, d)))
    indices = rng.integers(-rows // 14, rows + rows // 14, (tokens, topk)).astype(np.int32)
    return q, kv, indices, logit_spread * d**-0.5


def run(backend: str, q, kv, indices, sm_scale=1.0, **arguments: Any) -> SparsePrefillResult:
    result = sparse_prefill(q, kv, indices, sm_scale, backend=backend, **arguments)
    return jax.tree.map(np.asarray, result)


def values(result: SparsePrefillResult) -> np.ndarray:
    """The output of a test whose KV rows are constants: one number per (token, head)."""
    out = np.asarray(result.out, np.float32)
    np.testing.assert_array_equal(out, np.broadcast_to(out[..., :1], out.shape))
    return out[..., 0]


def assert_same_bits(left: SparsePrefillResult, right: SparsePrefillResult) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(
            np.asarray(a, np.float32).view(np.uint32), np.asarray(b, np.float32).view(np.uint32)
        )
