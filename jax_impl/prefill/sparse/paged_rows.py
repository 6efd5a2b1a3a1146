"""Rows out of several paged caches, in plain jax.numpy.

The slots of the caches are numbered one after another: slot s of the second is the number of
slots of the first plus s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from jax_impl.kv_cache import PagedKV
from jax_impl.kv_cache.tokens import row_bits

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Int32


def read_rows(
    caches: Sequence[PagedKV], num_slots: Sequence[int], slots: Int32[Array, " N"]
) -> BFloat16[Array, "N D"]:
    """The dequantised rows of slots, each of which exists.

    Every cache has at least one page, of which the first num_slots[i] slots count.
    """
    rows, first = None, 0
    for paged, count in zip(caches, num_slots, strict=True):
        own = jnp.clip(slots - first, 0, max(count - 1, 0))
        bits = row_bits(paged, own // paged.page_size, own % paged.page_size)
        rows = bits if rows is None else jnp.where((slots >= first)[:, None], bits, rows)
        first += count
    assert rows is not None  # there is a cache
    return lax.bitcast_convert_type(rows, jnp.bfloat16)
