"""Slots of a paged cache: token x % P of page block_table[request, x // P]."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_impl.arrays import namespace, to_jax
from jax_impl.prefill.indices import checks
from jax_impl.prefill.indices.checks import INT32_MAX

_NOWHERE = np.iinfo(np.int32).min
"""A page's first slot where there is no page: no token of it comes up to 0."""


class PagedBatch(NamedTuple):
    """A batch of n requests and T tokens, and the pages that hold what its tokens see."""

    query_start_loc: Any  # [n + 1] int32
    seq_lens: Any  # [n] int32
    block_table: Any  # [n, columns] int32
    slot_mapping: Any  # [T] int32, negative for padding
    page_size: Any
    num_slots: Any

    @classmethod
    def checked(
        cls,
        query_start_loc: Any,
        seq_lens: Any,
        block_table: Any,
        slot_mapping: Any,
        *,
        page_size: Any,
        num_slots: Any,
    ) -> PagedBatch:
        """Of arrays that agree on n and T."""
        page_size, num_slots = checks.cache_of(page_size, num_slots)
        num_requests = checks.batch_of(query_start_loc, seq_lens)
        rows, columns = checks.int32_shape(block_table, "block_table", "[n, columns]")
        checks.check_columns(columns, "block_table")
        if rows != num_requests:
            raise ValueError(
                f"block_table must have a row for each of the {num_requests} requests; got {rows}"
            )
        checks.int32_shape(slot_mapping, "slot_mapping", "[T]")
        return cls(query_start_loc, seq_lens, block_table, slot_mapping, page_size, num_slots)

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    def known_tokens(self, validate: bool, *others: Any) -> checks.HostTokens | None:
        """The tokens, if values may and can be looked at, those of the others among them."""
        if not checks.known(validate, *self[:4], *others):
            return None
        checks.check_batch(self.query_start_loc, self.seq_lens, self.num_tokens)
        return checks.host_tokens(self.query_start_loc, self.seq_lens)

    def check_pages(self, request: int, wanted: np.ndarray) -> None:
        """The pages of the wanted positions (or entries) of a request are in table and cache."""
        checks.check_table(
            self.block_table, "block_table", self.page_size, self.num_slots, request, wanted
        )

    def as_jax(self) -> PagedBatch:
        names = self._fields[:4]
        return self._replace(**{name: to_jax(getattr(self, name), name) for name in names})

    def slots_of(self, request: jax.Array, token: jax.Array) -> jax.Array:
        return slots_of(self.block_table, request, token, self.page_size, self.num_slots)


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
    xp = namespace(block_table)
    there = (block_table >= 0) & (block_table < num_slots // page_size)
    first = xp.where(there, before + block_table * page_size, _NOWHERE)
    return xp.pad(first, [(0, 0), (0, 1)], constant_values=_NOWHERE)


def column_of(token: jax.Array, page_size: Any, num_columns: int) -> jax.Array:
    xp = namespace(token)
    column = xp.minimum(token // page_size, num_columns)
    return xp.where(token >= 0, column, num_columns)


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
    return namespace(slots).maximum(slots + offset, -1)


def no_table(num_requests: int) -> np.ndarray:
    return np.zeros((num_requests, 0), np.int32)


def as_jax(**arrays: Any) -> list[jax.Array]:
    """The arrays as JAX's, in the order given; their names are for what can't be handed over."""
    return [to_jax(array, name) for name, array in arrays.items()]
