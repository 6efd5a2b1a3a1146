"""The producer that reads pages of float8 tokens itself, in the place of the gather.

Its keys pass through registers, where they are widened to bfloat16: exactly what a gather into
a workspace would have left there, in the same slots at the same time, so that consumers can't
tell the difference.

A slot is filled in parts of some column tiles. While one is widened and stored, the next few are
on their way into registers, across the ends of pairs and tiles too; what is read ahead behind
the last tile is dropped. Loads wait for nobody, so a slot that becomes free is filled without
waiting for memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic.layouts import QUAD_KEY
from jax_impl.prefill.kernel_sm90 import barriers
from jax_impl.prefill.kernel_sm90.config import PagedConfig
from jax_impl.prefill.kernel_sm90.context import I32, Context, OwnTile, Tile
from jax_impl.prefill.kernel_sm90.problem import BLOCK_KEYS, LEFT, PAIR_KEYS, SIDES
from jax_impl.prefill.validity import key_is_valid


class _Part(NamedTuple):
    """What is loaded, and stored, at a time: some column tiles of one slot."""

    slot: int
    side: int
    tiles: range
    is_first: bool  # of its slot's side
    is_last: bool

    @property
    def begins_block(self) -> bool:
        return self.is_first and self.side == LEFT


class _Pair(NamedTuple):
    """A pair of blocks: which part of which token's list, and of how long a list."""

    token: Any
    first_slot: Any
    length: Any


class _Loaded(NamedTuple):
    """A part that is on its way."""

    scales: Any  # of the whole block, if the part begins it
    columns: Any


def _parts_of_pair(k: Context) -> list[_Part]:
    """In the order in which slots are given back, and wanted."""
    assert isinstance(k.config, PagedConfig)
    width = k.config.part_tiles
    return [
        _Part(slot, side, tiles[i : i + width], i == 0, i + width >= len(tiles))
        for slot in barriers.SLOTS
        for side in SIDES
        for tiles in (k.problem.value_tiles(side),)
        for i in range(0, len(tiles), width)
    ]


def produce(k: Context) -> None:
    """Fills the slots for all tiles of this thread block."""
    plgpu.set_max_registers(k.config.producer_registers, action="decrease")
    parts = _parts_of_pair(k)

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
            next_tile = own.following.number
            pl.when(is_last)(lambda: k.seams.prefetch_queries(k.gmem.q, next_tile))
            return _fill_pair(k, parts, following, own.following, *carry)

        return lax.fori_loop(0, own.num_pairs, fill, carry)

    first = k.own_tile(I32(0))
    pair = _Pair(first.token, I32(0), k.held_to_list(k.gmem.length[first.token]))
    slots = _holes_marked(k, pair, _load_slots(k, pair))
    ahead = [_load(k, part, slots) for part in parts[: _lookahead(k)]]
    rounds, _, _ = k.for_own_tiles(fill_tile, (I32(0), slots, ahead))
    for slot in barriers.SLOTS:
        for side in SIDES:
            k.seams.wait(k.smem.barriers, barriers.kv_free[slot][side], rounds - 1)


def _lookahead(k: Context) -> int:
    assert isinstance(k.config, PagedConfig)
    return k.config.lookahead


def _load_slots(k: Context, pair: _Pair) -> tuple[Any, ...]:
    return tuple(
        k.seams.load_indices(
            k.gmem.indices, pair.token, pair.first_slot + block * BLOCK_KEYS, QUAD_KEY
        )
        for block in barriers.SLOTS
    )


def _holes_marked(k: Context, pair: _Pair, slots: tuple[Any, ...]) -> tuple[Any, ...]:
    """The slots of both blocks, -1 for every hole."""
    marked = []
    for block, slot in zip(barriers.SLOTS, slots, strict=True):
        place = plgpu.broadcasted_iota(jnp.int32, (BLOCK_KEYS,), 0, layout=QUAD_KEY)
        place = pair.first_slot + block * BLOCK_KEYS + place
        valid = key_is_valid(slot, place, k.problem.num_kv, pair.length)
        marked.append(jnp.where(valid, slot, -1))
    return tuple(marked)


def _load(k: Context, part: _Part, slots: tuple[Any, ...]) -> _Loaded:
    own = slots[part.slot]
    scales = k.seams.load_scales(k.gmem.kv, own, k.problem) if part.begins_block else None
    l2_prefetch = k.config.gather_prefetch_for(k.problem)
    columns = k.seams.load_columns(k.gmem.kv, own, part.tiles, k.problem, l2_prefetch)
    return _Loaded(scales, columns)


def _fill_pair(
    k: Context,
    parts: list[_Part],
    following: _Pair,
    next_tile: Tile,
    rounds: Any,
    slots: tuple[Any, ...],
    ahead: list[_Loaded],
) -> Any:
    """rounds: pairs filled before this one; ahead: its first parts, which are on their way."""
    ahead = list(ahead)
    raw_next_slots = _load_slots(k, following)
    next_slots: tuple[Any, ...] = ()
    factors = unusual_scales = unusual = None
    for number, part in enumerate(parts):
        if number == len(parts) // 2:  # by now they are there
            next_slots = _holes_marked(k, following, raw_next_slots)
            if k.config.prefetches_rows(k.problem):
                sharers = k.problem.head_tiles
                k.seams.prefetch_page_rows(
                    k.gmem.kv, next_slots, next_tile.number, sharers, k.problem
                )
        if part.is_first:
            _wait_until_free(k, part, rounds, slots)
        loaded = ahead.pop(0)
        if part.begins_block:
            factors, unusual_scales = k.seams.scale_factors(loaded.scales)
        if part.is_first:
            unusual = unusual_scales
        unusual = k.seams.store_columns(
            k.smem.kv, part.slot, part.tiles, loaded.columns, factors, unusual, k.problem
        )
        if part.is_last:
            _announce(k, part, slots, unusual)

        behind = number + _lookahead(k) - len(parts)
        if behind < 0:
            ahead.append(_load(k, parts[behind], slots))
        else:
            ahead.append(_load(k, parts[behind], next_slots))
    return rounds + 1, next_slots, ahead


def _wait_until_free(k: Context, part: _Part, rounds: Any, slots: tuple[Any, ...]) -> None:
    k.seams.wait(k.smem.barriers, barriers.kv_free[part.slot][part.side], rounds - 1)
    if part.side == LEFT:
        mask = jnp.where(slots[part.slot] >= 0, 0.0, -jnp.inf)
        k.seams.publish(k.smem.mask.at[part.slot], mask, QUAD_KEY)
        k.seams.arrive(k.smem.barriers, barriers.kv_ready[part.slot][LEFT])


def _announce(k: Context, part: _Part, slots: tuple[Any, ...], unusual: Any) -> None:
    tiles = k.problem.value_tiles(part.side)
    k.seams.store_unusual(
        k.smem.kv, part.slot, tiles, k.gmem.kv, slots[part.slot], unusual, k.problem
    )
    # The fence that the products need is on their side, which spares the loads on their way.
    k.seams.arrive(k.smem.barriers, barriers.kv_ready[part.slot][part.side])
