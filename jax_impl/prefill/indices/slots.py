"""Slots of a paged cache: token x % P of page block_table[request, x // P]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.arrays import to_jax
from jax_impl.prefill.indices.checks import INT32_MAX

_NOWHERE = np.iinfo(np.int32).min
"""A page's first slot where there is no page: no token of it comes up to 0."""


def slots_of(
    block_table: jax.Array, request: jax.Array, token: jax.Array, page_size: Any, num_slots: Any
) -> jax.Array:
    """The slot of each token (a position, or a compressed entry's number) of a request.

    -1 where token is negative, in no column of the table, or on a page that the cache, of
    num_slots slots, doesn't have: nothing wraps around, neither a negative page nor an index.
    """
    column = column_of(token, page_size, block_table.shape[1])
    first = first_slots(block_table, page_size, num_slots)
    return look_up(first, request, column, token % page_size)


def first_slots(
    block_table: jax.Array, page_size: Any, num_slots: Any, before: Any = 0
) -> jax.Array:
    """[n, columns + 1]: the number of each page's first slot, counted behind `before` slots.

    The column behind the table's is where `column_of` sends what is in none of them.
    """
    there = (block_table >= 0) & (block_table < num_slots // page_size)
    first = jnp.where(there, before + block_table * page_size, _NOWHERE)
    return jnp.pad(first, [(0, 0), (0, 1)], constant_values=_NOWHERE)


def column_of(token: jax.Array, page_size: Any, num_columns: int) -> jax.Array:
    column = jnp.minimum(token // page_size, num_columns)
    return jnp.where(token >= 0, column, num_columns)


def look_up(
    first: jax.Array, request: jax.Array, column: jax.Array, offset: jax.Array
) -> jax.Array:
    """The slots at an offset into the pages of the given columns of `first_slots`; -1: none.

    Rows and columns go in as one number where an int32 holds it, and what is nowhere needs no mask:
    XLA then writes a list in one pass and keeps no other array of its size.
    """
    num_requests, num_columns = first.shape
    if num_requests * num_columns <= INT32_MAX:
        slots = first.reshape(-1)[request * num_columns + column]
    else:
        slots = first[request, column]
    return jnp.maximum(slots + offset, -1)


def no_table(num_requests: int) -> np.ndarray:
    return np.zeros((num_requests, 0), np.int32)


def as_jax(**arrays: Any) -> list[jax.Array]:
    """The arrays as JAX's, in the order given; their names are for what can't be handed over."""
    return [to_jax(array, name) for name, array in arrays.items()]
