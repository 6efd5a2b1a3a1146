"""Slots of a paged cache: token x % P of page block_table[request, x // P]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.arrays import to_jax


def slots_of(
    block_table: jax.Array, request: jax.Array, token: jax.Array, page_size: Any, num_slots: Any
) -> jax.Array:
    """The slot of each token (a position, or a compressed entry's number) of a request.

    -1 where token is negative, in no column of the table, or on a page that the cache, of
    num_slots slots, doesn't have: nothing wraps around, neither a negative page nor an index.
    """
    num_columns = block_table.shape[1]
    if not num_columns:
        return jnp.full(jnp.broadcast_shapes(request.shape, token.shape), -1, jnp.int32)
    column = token // page_size
    page = block_table[request, jnp.clip(column, 0, num_columns - 1)]
    listed = (token >= 0) & (column < num_columns)
    there = listed & (page >= 0) & (page < num_slots // page_size)
    return jnp.where(there, page * page_size + token % page_size, -1)


def no_table(num_requests: int) -> np.ndarray:
    return np.zeros((num_requests, 0), np.int32)


def as_jax(**arrays: Any) -> list[jax.Array]:
    """The arrays as JAX's, in the order given; their names are for what can't be handed over."""
    return [to_jax(array, name) for name, array in arrays.items()]
