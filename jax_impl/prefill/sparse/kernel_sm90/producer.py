"""The gather: one warpgroup that copies key blocks into the two slots, ahead of their readers.

A slot is filled and freed in two column groups, left and right, because each consumer is done
with its half of the values at its own time. The rope columns travel with the side whose
consumer reads the weights that may have taken their place.

The gather runs across tile boundaries: the first blocks of the next tile are on their way while
the consumers still write the results of this one. The indices of a pair are loaded one pair
ahead, since nothing can be copied before they are there.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic.blocks import BLOCK_KEYS, EVEN, LEFT, ODD, PAIR_KEYS, RIGHT, SIDES, SLOTS
from jax_impl.mosaic.layouts import KEY
from jax_impl.prefill.sparse.kernel_sm90.kernel import (
    I32,
    Context,
    OwnTile,
    Tile,
    kv_free,
    kv_ready,
)
from jax_impl.prefill.sparse.validity import key_is_valid

# The weights of the even block are read by the right consumer, those of the odd by the left.
_ROPE_SIDE = {EVEN: RIGHT, ODD: LEFT}


class _Pair(NamedTuple):
    """Where the producer stands: a pair of blocks of one tile, and what follows it."""

    first_slot: Any  # of the index list
    length: Any
    is_last: Any  # of its tile
    next_tile: Tile
    next_token: Any  # of the pair after this one, which may be the next tile's first
    next_slot: Any


def produce(k: Context) -> None:
    """Fills the slots for all tiles of this thread block."""
    plgpu.set_max_registers(k.config.producer_registers, action="decrease")

    def fill_tile(own: OwnTile, carry: Any) -> Any:
        def fill(p: Any, carry: Any) -> Any:
            is_last = p == own.num_pairs - 1
            first_slot = p * PAIR_KEYS
            pair = _Pair(
                first_slot=first_slot,
                length=own.length,
                is_last=is_last,
                next_tile=own.following,
                next_token=jnp.where(is_last, own.following.token, own.tile.token),
                next_slot=jnp.where(is_last, 0, first_slot + PAIR_KEYS),
            )
            return _fill_pair(k, pair, *carry)

        return lax.fori_loop(0, own.num_pairs, fill, carry)

    first_indices = _load_indices(k, k.own_tile(I32(0)).token, I32(0))
    rounds, _ = k.for_own_tiles(fill_tile, (I32(0), first_indices))
    # The last copies have landed when their readers are done with them.
    for slot in SLOTS:
        for side in SIDES:
            k.seams.wait(k.smem.barriers, kv_free[slot][side], rounds - 1)


def _load_indices(k: Context, token: Any, first_slot: Any) -> tuple[Any, Any]:
    return tuple(
        k.seams.load_indices(k.gmem.indices, token, first_slot + block * BLOCK_KEYS, KEY)
        for block in (EVEN, ODD)
    )


def _fill_pair(k: Context, pair: _Pair, rounds: Any, indices: Any) -> Any:
    """rounds: pairs filled before this one."""
    # Just ahead of its use: L2 turns over within one tile.
    pl.when(pair.is_last)(lambda: k.prefetch_queries(pair.next_tile))
    next_indices = _load_indices(k, pair.next_token, pair.next_slot)

    for slot in SLOTS:
        index = indices[slot]
        place = plgpu.broadcasted_iota(jnp.int32, (BLOCK_KEYS,), 0, layout=KEY)
        place = pair.first_slot + slot * BLOCK_KEYS + place
        valid = key_is_valid(index, place, k.problem.num_kv, pair.length)

        k.seams.wait(k.smem.barriers, kv_free[slot][LEFT], rounds - 1)
        k.seams.publish(k.smem.mask.at[slot], jnp.where(valid, 0.0, -jnp.inf), KEY)
        k.seams.arrive(k.smem.barriers, kv_ready[slot][LEFT])
        _fill_slot(k, slot, jnp.where(valid, index, 0), valid, rounds)
        if slot == EVEN and k.config.prefetches_rows(k.problem):
            _prefetch_rows(k, pair, next_indices)
    return rounds + 1, next_indices


def _fill_slot(k: Context, slot: int, rows: Any, valid: Any, rounds: Any) -> None:
    """Copies the rows of a block; holes become rows of zeros, so that they can't make a NaN."""
    copy = functools.partial(
        k.seams.copy_columns, k.gmem.kv, k.smem.kv, slot, rows=rows, valid=valid,
        l2_prefetch=k.config.gather_prefetch_for(k.problem),
    )  # fmt: skip
    for side in SIDES:
        if side == RIGHT:
            k.seams.wait(k.smem.barriers, kv_free[slot][RIGHT], rounds - 1)
        copy(tiles=k.problem.value_tiles(side))
        if side == _ROPE_SIDE[slot]:
            copy(tiles=k.problem.rope_tiles)
        k.seams.arrive_after_copies(k.smem.barriers, kv_ready[slot][side])


def _prefetch_rows(k: Context, pair: _Pair, indices: Any) -> None:
    # For a request that changes no result it is enough that the row exists.
    exists = tuple(key_is_valid(index, 0, k.problem.num_kv, 1) for index in indices)
    k.seams.prefetch_rows(k.gmem.kv, indices, exists, pair.next_tile.number, k.problem.head_tiles)
