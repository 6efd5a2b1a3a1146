"""Some tokens of a batch in place: their rows have the bits of a call of their own, and all other
rows stay as they were."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import SparsePrefillResult, sparse_prefill, sparse_prefill_paged
from jax_impl.prefill.sparse.api import sparse_prefill_into
from jax_impl.prefill.sparse.batch import BatchRows
from jax_impl.prefill.sparse.paged import sparse_prefill_paged_into
from tests.jax_impl.prefill.problems import assert_same_bits, random_problem
from tests.jax_impl.prefill.sparse.pages import random_caches

BATCH, TOPK = 5, 128
UNTOUCHED = 7.0
SIZES = ((3, 64), (40, 2))

each_way = pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])


def functions(paged: bool) -> tuple[Any, Any, Any, int]:
    """One call, the same in place, the keys and how many there are."""
    if paged:
        caches = random_caches(*SIZES)
        count = sum(cache.num_slots for cache in caches)
        return sparse_prefill_paged, sparse_prefill_paged_into, caches, count
    kv = random_problem(0)[1]
    return sparse_prefill, sparse_prefill_into, kv, len(kv)


def untouched(heads: int) -> SparsePrefillResult:
    rows = (BATCH, heads)
    return SparsePrefillResult(
        jnp.full((*rows, 512), UNTOUCHED, jnp.bfloat16),
        jnp.full(rows, UNTOUCHED),
        jnp.full(rows, UNTOUCHED),
    )


# At the beginning and at the end, two tiles a token, padded heads, queries that are negated first.
@pytest.mark.parametrize(
    ("heads", "sign", "first", "count"),
    [(64, 1, 0, 2), (64, 1, 3, 2), (128, 1, 2, 1), (3, 1, 1, 3), (64, -1, 2, 2)],
)
@each_way
def test_rows_are_written_where_they_belong(backend, paged, heads, sign, first, count):
    alone, into, keys, num_keys = functions(paged)
    rng = np.random.default_rng(heads)
    q = jnp.asarray(rng.standard_normal((BATCH, heads, 512)), jnp.bfloat16)
    lists = jnp.asarray(rng.integers(-9, num_keys + 9, (count, TOPK)), jnp.int32)
    lengths = jnp.asarray([TOPK, 70, 1, 0, 99][:count], jnp.int32)
    sink = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    sm_scale = sign * 512**-0.5
    settings = {"attn_sink": sink, "topk_length": lengths, "backend": backend}

    @jax.jit
    def in_place(whole: SparsePrefillResult, first_token: jax.Array) -> SparsePrefillResult:
        batch = BatchRows(q, SparsePrefillResult(*map(jax.new_ref, whole)), first_token)
        held = jnp.asarray(keys) if not paged else keys
        into(batch, held, lists, sm_scale, **settings)
        return batch.written()

    result = in_place(untouched(heads), jnp.int32(first))
    mine = slice(first, first + count)
    expected = alone(q[mine], keys, lists, sm_scale, **settings)
    assert_same_bits(SparsePrefillResult(*(array[mine] for array in result)), expected)
    for array in result:
        others = np.delete(np.asarray(array, np.float32), np.arange(BATCH)[mine], axis=0)
        assert (others == UNTOUCHED).all()
