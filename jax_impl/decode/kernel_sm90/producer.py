"""The producer: one warpgroup that brings key blocks into the two slots, ahead of their readers.

A slot is filled and freed in chunks of columns, because each consumer is done with its own at
its own time. The rotary columns travel with the chunk whose consumer reads the weights that
have taken their place.

It runs across items: the first blocks of the next item are on their way while the consumers
still write the results of this one. Page numbers are read one pair ahead, since nothing can be
copied before they are there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.decode.kernel_sm90.kernel import I32, ROPE_CHUNK, ROPE_FREED_WITH, Context, Item
from jax_impl.decode.kernel_sm90.problem import CHUNKS, CLUSTER_AXIS, ROPE, chunk_columns
from jax_impl.mosaic.blocks import BLOCK_KEYS, PAIR_KEYS, SLOTS

LOOKAHEAD = 2


class Part(NamedTuple):
    """What is brought in at a time: some columns of one slot."""

    slot: int
    chunk: int
    columns: Any
    freed_with: int  # the chunk whose barrier says that it may be overwritten


def _parts(slot: int) -> list[Part]:
    """The parts of a slot, in the order in which the consumers free and await them."""
    parts = []
    for chunk in range(CHUNKS):
        parts.append(Part(slot, chunk, chunk_columns(chunk), chunk))
        if chunk == ROPE_FREED_WITH[slot]:
            parts.append(Part(slot, ROPE_CHUNK, ROPE, chunk))
    return parts


PARTS_OF_PAIR = tuple(part for slot in SLOTS for part in _parts(slot))


def produce(k: Context) -> None:
    """Fills the slots for all items of this thread block."""
    plgpu.set_max_registers(k.registers[1], action="decrease")
    fill = _widened if k.problem.widened else _copied
    rounds = lax.fori_loop(k.first, k.last, lambda number, n: fill(k, k.item(number), n), I32(0))

    # Everything has been read then; and with a cluster, the arrivals of the other thread block
    # don't find this one gone.
    @pl.when(rounds > 0)
    def _stay() -> None:
        for slot in SLOTS:
            for chunk in range(CHUNKS):
                plgpu.barrier_wait(k.smem.kv_free[chunk].at[slot])


def _copied(k: Context, item: Item, rounds: Any) -> Any:
    """Fills the slots for one item by TMA; `rounds` pairs were filled before."""

    def fill(p: Any, carry: Any) -> Any:
        rounds, pages = carry
        first_key = (item.first_pair + p) * PAIR_KEYS
        next_pages = _pages_of_pair(k, item, first_key + PAIR_KEYS)
        for part in PARTS_OF_PAIR:
            _wait_until_free(k, part, rounds)
            first_in_page = _first_in_page(k, first_key + part.slot * BLOCK_KEYS)
            _copy(k, part, pages[part.slot], first_in_page)
        return rounds + 1, next_pages

    first_pages = _pages_of_pair(k, item, item.first_pair * PAIR_KEYS)
    return lax.fori_loop(0, item.num_pairs, fill, (rounds, first_pages))[0]


def _copy(k: Context, part: Part, pages: tuple[Any, ...], first_in_page: Any) -> None:
    rows = k.problem.rows_per_copy
    sharing: dict[str, Any] = {"collective_axes": CLUSTER_AXIS} if k.problem.multicast else {}
    for number, page in enumerate(pages):
        plgpu.copy_gmem_to_smem(
            k.gmem.kv.at[page, pl.ds(first_in_page, rows), part.columns],
            k.smem.keys[part.chunk].at[part.slot, pl.ds(number * rows, rows)],
            k.smem.kv_ready[part.chunk].at[part.slot],
            **sharing,
        )


def _widened(k: Context, item: Item, rounds: Any) -> Any:
    """The same for a float8 cache: through registers, which hold the parts that come next.

    Two parts are on their way while one is widened, across the end of a pair too; what is read
    ahead behind the item's last pair is dropped.
    """

    def load(part: Part, pages: Any, first_key: Any) -> Any:
        first_in_page = _first_in_page(k, first_key + part.slot * BLOCK_KEYS)
        return k.seams.load_narrow(
            k.gmem.kv, pages[part.slot], first_in_page, part.columns, k.problem
        )

    def fill(p: Any, carry: Any) -> Any:
        rounds, pages, *ahead = carry
        first_key = (item.first_pair + p) * PAIR_KEYS
        next_pages = _pages_of_pair(k, item, first_key + PAIR_KEYS)
        for number, part in enumerate(PARTS_OF_PAIR):
            following = number + LOOKAHEAD - len(PARTS_OF_PAIR)
            if following < 0:
                ahead.append(load(PARTS_OF_PAIR[following], pages, first_key))
            else:
                ahead.append(load(PARTS_OF_PAIR[following], next_pages, first_key + PAIR_KEYS))
            _wait_until_free(k, part, rounds)
            place = k.smem.keys[part.chunk].at[part.slot]
            ready = k.smem.kv_ready[part.chunk].at[part.slot]
            k.seams.store_widened(place, ready, ahead.pop(0), k.gmem.kv, part.columns, k.problem)
        return rounds + 1, next_pages, *ahead

    first_key = item.first_pair * PAIR_KEYS
    pages = _pages_of_pair(k, item, first_key)
    ahead = [load(part, pages, first_key) for part in PARTS_OF_PAIR[:LOOKAHEAD]]
    return lax.fori_loop(0, item.num_pairs, fill, (rounds, pages, *ahead))[0]


def _wait_until_free(k: Context, part: Part, rounds: Any) -> None:
    if part.freed_with == part.chunk:
        free = k.smem.kv_free[part.chunk].at[part.slot]
        pl.when(rounds > 0)(lambda: plgpu.barrier_wait(free))


def _pages_of_pair(k: Context, item: Item, first_key: Any) -> tuple[tuple[Any, ...], ...]:
    """Numbers of the pages that the blocks of a pair lie on.

    Behind the request's last key the table may hold anything; its last page stands in.
    """
    size = I32(k.problem.page_size)
    last_column = lax.div(jnp.maximum(item.end - 1, 0), size)

    def page(key: Any) -> Any:
        number = k.gmem.block_table[item.request, jnp.minimum(lax.div(key, size), last_column)]
        return jnp.clip(number, 0, k.problem.num_pages - 1)

    return tuple(
        tuple(
            page(first_key + slot * BLOCK_KEYS + part * k.problem.rows_per_copy)
            for part in range(k.problem.pages_per_block)
        )
        for slot in SLOTS
    )


def _first_in_page(k: Context, key: Any) -> Any:
    """Where a block starts on its (first) page."""
    if k.problem.page_size <= BLOCK_KEYS:
        return 0
    return lax.rem(key, I32(k.problem.page_size))
