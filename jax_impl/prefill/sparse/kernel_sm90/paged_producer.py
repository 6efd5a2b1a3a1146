"""The producer that reads pages of float8 tokens itself, in the place of the gather.

Keys pass through registers, where they are widened to bfloat16: exactly what a gather into a
workspace would have left there, in the same slots at the same time, so that consumers can't
tell the difference.

While one side of a block is widened and stored, the next is on its way into registers, across
the ends of pairs and tiles too; what is read ahead behind the last tile is dropped. Loads wait
for no slot, so that a slot, once free, is filled without waiting for memory. Order of events:

    all that has been loaded of this side is waited for
    the next side's first part is asked for, its scales included
    this side is looked through for what takes the slow way
    this side's slot is waited for
    columns that are bfloat16 in the pages are copied there
    this side is stored; the next side's other part is asked for when registers are free

Waiting comes before asking because a thread counts the loads that it waits for on a few
counters: what is asked for earlier would be waited for as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic.blocks import BLOCK_KEYS, EVEN, LEFT, PAIR_KEYS, RIGHT, SIDES, SLOTS
from jax_impl.mosaic.layouts import QUAD_KEY
from jax_impl.prefill.sparse.kernel_sm90.config import PagedConfig
from jax_impl.prefill.sparse.kernel_sm90.kernel import (
    I32,
    Context,
    OwnTile,
    Tile,
    kv_free,
    kv_ready,
)
from jax_impl.prefill.sparse.kernel_sm90.problem import PLAIN_TILE
from jax_impl.prefill.sparse.validity import key_is_valid


def _config(k: Context) -> PagedConfig:
    assert isinstance(k.config, PagedConfig)
    return k.config


class _Side(NamedTuple):
    """One side of one slot, in parts of some column tiles."""

    number: int  # in a pair
    slot: int
    side: int
    parts: tuple[range, ...]  # those of codes

    @property
    def begins_block(self) -> bool:
        return self.side == LEFT


class _Pair(NamedTuple):
    """A pair of blocks: which part of which token's list, and of how long a list."""

    token: Any
    first_slot: Any
    length: Any


class _Block(NamedTuple):
    """The keys of a block."""

    slots: Any  # of the caches; -1 for a hole
    places: Any  # where these lie


class _Loaded(NamedTuple):
    """A side that is on its way, or has come."""

    block: _Block
    scales: Any
    parts: tuple[Any, ...]


def _code_tiles(k: Context, side: int) -> range:
    tiles = k.problem.value_tiles(side)
    return range(tiles.start, min(tiles.stop, PLAIN_TILE))


def _sides_of_pair(k: Context) -> list[_Side]:
    """The sides of a pair, in the order in which the consumers free and await them."""
    width = _config(k).part_tiles
    sides = []
    for slot in SLOTS:
        for side in SIDES:
            tiles = _code_tiles(k, side)
            parts = tuple(tiles[i : i + width] for i in range(0, len(tiles), width))
            sides.append(_Side(len(sides), slot, side, parts))
    return sides


def _with_the_one_behind(sides: list[_Side]) -> list[tuple[_Side, _Side]]:
    return list(zip(sides, sides[1:] + sides[:1], strict=True))


def produce(k: Context) -> None:
    """Fills the slots for all tiles of this thread block."""
    plgpu.set_max_registers(k.config.producer_registers, action="decrease")

    def fill_tile(own: OwnTile, carry: Any) -> Any:
        def fill(p: Any, carry: Any) -> Any:
            is_last = p == own.num_pairs - 1
            next_length = k.held_to_list(own.following_stated_length)
            following = _Pair(
                token=jnp.where(is_last, own.following.token, own.tile.token),
                first_slot=jnp.where(is_last, 0, (p + 1) * PAIR_KEYS),
                length=jnp.where(is_last, next_length, own.length),
            )
            # Just ahead of its use: L2 turns over within one tile.
            pl.when(is_last)(lambda: k.prefetch_queries(own.following))
            return _fill_pair(k, following, own.following, *carry)

        return lax.fori_loop(0, own.num_pairs, fill, carry)

    first = k.own_tile(I32(0))
    pair = _Pair(first.token, I32(0), k.held_to_list(k.gmem.length[first.token]))
    slots = _holes_marked(k, pair, _load_slots(k, pair))
    side = _sides_of_pair(k)[0]
    nothing = k.seams.arrived([])
    loaded = _load(k, side.parts, _begin_block(k, slots[EVEN], nothing), nothing)
    rounds, _, _ = k.for_own_tiles(fill_tile, (I32(0), slots, loaded))
    for slot in SLOTS:
        for side in SIDES:
            k.seams.wait(k.smem.barriers, kv_free[slot][side], rounds - 1)


def _load_slots(k: Context, pair: _Pair) -> tuple[Any, ...]:
    return tuple(
        k.seams.load_indices(
            k.gmem.indices, pair.token, pair.first_slot + block * BLOCK_KEYS, QUAD_KEY
        )
        for block in SLOTS
    )


def _holes_marked(k: Context, pair: _Pair, slots: tuple[Any, ...]) -> tuple[Any, ...]:
    """The slots of both blocks, -1 for every hole."""
    marked = []
    for block, slot in zip(SLOTS, slots, strict=True):
        place = plgpu.broadcasted_iota(jnp.int32, (BLOCK_KEYS,), 0, layout=QUAD_KEY)
        place = pair.first_slot + block * BLOCK_KEYS + place
        valid = key_is_valid(slot, place, k.problem.num_kv, pair.length)
        marked.append(jnp.where(valid, slot, -1))
    return tuple(marked)


def _begin_block(k: Context, slots: Any, after: Any) -> _Loaded:
    """A block of which only the scales are on their way."""
    places = k.seams.locate(k.gmem.kv, slots, k.problem)
    scales = k.seams.load_scales(k.gmem.kv, slots, places, after, k.problem)
    return _Loaded(_Block(slots, places), scales, ())


def _load(k: Context, parts: tuple[range, ...], loaded: _Loaded, after: Any) -> _Loaded:
    """Asks for some parts more."""
    prefetch = k.config.gather_prefetch_for(k.problem)
    more = tuple(
        k.seams.load_columns(k.gmem.kv, loaded.block.places, tiles, after, k.problem, prefetch)
        for tiles in parts
    )
    return loaded._replace(parts=loaded.parts + more)


def _fill_pair(
    k: Context,
    following: _Pair,
    next_tile: Tile,
    rounds: Any,
    slots: tuple[Any, ...],
    loaded: _Loaded,
) -> Any:
    """rounds: pairs filled before this one; loaded: its first side, which is on its way."""
    next_slots = slots
    noted: Any = None
    for side, behind in _with_the_one_behind(_sides_of_pair(k)):
        if side.begins_block:
            noted = k.seams.unusual_scales(loaded.scales)
        # Slots are loaded a pair ahead, since nothing can be loaded before they are there.
        if side.number == 0:
            next_slots = _load_slots(k, following)
        elif side.number == 2:
            next_slots = _holes_marked(k, following, next_slots)
            if k.config.prefetches_rows(k.problem):
                k.seams.prefetch_page_rows(
                    k.gmem.kv, next_slots, next_tile.number, k.problem.head_tiles, k.problem
                )
        after = k.seams.arrived([piece for part in loaded.parts for piece in part])
        ahead = loaded._replace(parts=())
        if behind.begins_block:
            own = (next_slots if behind.number == 0 else slots)[behind.slot]
            ahead = _begin_block(k, own, after)
        loaded = _fill_side(k, side, rounds, loaded, noted, behind, ahead, after)
    return rounds + 1, next_slots, loaded


def _looked_through(k: Context, loaded: _Loaded, noted: Any) -> Any:
    """1 if there is anything that takes store_exactly; noted: of the scales."""
    for columns in loaded.parts:
        noted = k.seams.note_unusual(columns, noted)
    return k.seams.any_unusual(noted)


def _fill_side(
    k: Context,
    side: _Side,
    rounds: Any,
    loaded: _Loaded,
    noted: Any,
    behind: _Side,
    ahead: _Loaded,
    after: Any,
) -> _Loaded:
    """Stores a side that has arrived, and asks for all of the one behind it."""
    early = _config(k).early_tiles // _config(k).part_tiles
    ahead = _load(k, behind.parts[:early], ahead, after)
    unusual = _looked_through(k, loaded, noted)
    late = behind.parts[early:]
    ready = kv_ready[side.slot][side.side]
    _wait_until_free(k, side, rounds, loaded.block.slots)
    if side.side == RIGHT:
        _copy_plain(k, side, loaded.block)

    def as_usual(ahead: _Loaded) -> _Loaded:
        for number, (tiles, columns) in enumerate(zip(side.parts, loaded.parts, strict=True)):
            k.seams.store_columns(k.smem.kv, side.slot, tiles, columns, loaded.scales, k.problem)
            end = number + 1 if number + 1 < len(side.parts) else len(late)
            ahead = _load(k, late[number:end], ahead, after)
        # The fence that the products need is on their side, as for the gather.
        k.seams.arrive(k.smem.barriers, ready)
        return ahead

    def exactly(ahead: _Loaded) -> _Loaded:
        tiles = _code_tiles(k, side.side)
        places, scales = loaded.block.places, loaded.scales
        k.seams.store_exactly(k.smem.kv, side.slot, tiles, k.gmem.kv, places, scales, k.problem)
        k.seams.arrive(k.smem.barriers, ready)
        return _load(k, late, ahead, after)

    return lax.cond(unusual != 0, exactly, as_usual, ahead)


def _copy_plain(k: Context, side: _Side, block: _Block) -> None:
    """Starts the copy of the columns that needn't be widened; they are announced on their own."""
    k.seams.copy_plain(
        k.gmem.kv, k.smem.kv, side.slot, block.places, k.problem,
        k.config.gather_prefetch_for(k.problem),
    )  # fmt: skip
    k.seams.arrive_after_copies(k.smem.barriers, kv_ready[side.slot][RIGHT])


def _wait_until_free(k: Context, side: _Side, rounds: Any, keys: Any) -> None:
    k.seams.wait(k.smem.barriers, kv_free[side.slot][side.side], rounds - 1)
    if side.side == LEFT:
        mask = jnp.where(keys >= 0, 0.0, -jnp.inf)
        k.seams.publish(k.smem.mask.at[side.slot], mask, QUAD_KEY)
        k.seams.arrive(k.smem.barriers, kv_ready[side.slot][LEFT])
