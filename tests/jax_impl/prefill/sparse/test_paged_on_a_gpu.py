"""What only hardware shows of prefill that reads pages: every code, every scale, large batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import sparse_prefill, sparse_prefill_paged
from jax_impl.kv_cache import read_kv
from tests.jax_impl.prefill.problems import assert_same_bits, bf16
from tests.jax_impl.prefill.sparse.pages import (
    CODES,
    cache_of,
    random_caches,
    random_tokens,
    rows_of,
)

pytestmark = pytest.mark.gpu

SMALLEST_NORMAL = 2.0**-126


def both(caches, q, slots, **arguments):
    """Of this call and of gather-then-attend."""
    rows = jnp.concatenate(
        [read_kv(c, np.arange(c.num_slots, dtype=np.int32)) for c in caches if c.num_slots]
    )
    arguments |= {"sm_scale": 0.03, "backend": "pallas"}
    got = sparse_prefill_paged(q, caches, slots, **arguments)
    return got, sparse_prefill(q, rows, slots, **arguments)


@pytest.mark.parametrize("nan_codes", [False, True])
def test_every_code_under_every_scale_byte(nan_codes):
    """Token u has scale byte u and all codes; each query sees one token and returns its row."""
    tokens = random_tokens(256, 0)
    numbers = np.arange(256)[:, None]
    tokens[:, :CODES] = np.arange(CODES) + 37 * numbers
    tokens[:, -8:] = numbers
    if not nan_codes:
        codes = tokens[:, :CODES]
        codes[(codes & 0x7F) == 0x7F] = 0
    caches = (cache_of(tokens, 64),)
    slots = np.full((256, 128), -1, np.int32)
    slots[np.arange(256), np.arange(256) % 128] = np.arange(256)
    q = bf16(np.zeros((256, 64, 512)))
    got, expected = both(caches, q, slots)
    assert_same_bits(got, expected)
    out, rows = np.asarray(got.out)[:, 0], rows_of(caches)
    assert np.isnan(out.astype(np.float32)).all() == nan_codes
    if not nan_codes:
        values = rows.astype(np.float32)
        # An infinity makes NaN of all its row: 0 times it is one.
        exact = np.isfinite(values).all(axis=1, keepdims=True) & (np.abs(values) >= SMALLEST_NORMAL)
        assert exact.mean() > 0.9
        np.testing.assert_array_equal(out[exact], rows[exact])


@pytest.mark.parametrize(
    ("sizes", "heads", "topk"),
    [(((60, 64),), 64, 640), (((60, 64), (700, 2)), 128, 640), (((60, 53), (9, 256)), 100, 300)],
    ids=str,
)
def test_the_bits_of_gather_then_attend_time_and_again(sizes, heads, topk):
    """Ragged lengths and holes; ten times, since a race shows in some runs only."""
    rng = np.random.default_rng(0)
    caches = random_caches(*sizes)
    total = sum(cache.num_slots for cache in caches)
    tokens = 700
    q = bf16(rng.standard_normal((tokens, heads, 512)))
    slots = rng.integers(-total // 20, total + total // 20, (tokens, topk)).astype(np.int32)
    arguments = {
        "topk_length": rng.integers(0, topk + 1, tokens).astype(np.int32),
        "attn_sink": rng.standard_normal(heads).astype(np.float32),
    }
    got, expected = both(caches, q, slots, **arguments)
    assert_same_bits(got, expected)
    for _ in range(9):
        again, _ = both(caches, q, slots, **arguments)
        jax.tree.map(np.testing.assert_array_equal, again, got)
