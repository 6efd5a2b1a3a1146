"""Rows out of several paged caches, in plain jax.numpy.

The slots of the caches are numbered one after another: slot s of the second is the number of
slots of the first plus s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jax_impl.arrays import bits_as, namespace
from jax_impl.kv_cache import PagedKV
from jax_impl.kv_cache.tokens import decoded, region_bytes

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Int32


def read_rows(
    caches: Sequence[PagedKV], num_slots: Sequence[int], slots: Int32[Array, " N"]
) -> BFloat16[Array, "N D"]:
    """The dequantised rows of slots, each of which exists; of NumPy's arrays NumPy's.

    Every cache has at least one page, of which the first num_slots[i] slots count.
    """
    xp = namespace(slots)
    regions, first = None, 0
    for paged, count in zip(caches, num_slots, strict=True):
        own = xp.clip(slots - first, 0, max(count - 1, 0))
        found = region_bytes(paged, own // paged.page_size, own % paged.page_size)
        if regions is not None:
            here = (slots >= first)[:, None]
            found = [xp.where(here, new, old) for new, old in zip(found, regions, strict=True)]
        regions, first = found, first + count
    assert regions is not None  # there is a cache
    return bits_as(decoded(caches[0].layout, *regions), jnp.bfloat16)
