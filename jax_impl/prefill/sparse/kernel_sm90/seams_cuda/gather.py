"""The producer's copies, 16 bytes at a time, and its requests to the L2 cache.

TMA has a gather of rows only on later GPUs; cp.async lets every thread name its own address,
and writes zeros where a hole is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_impl.mosaic import ptx, registers
from jax_impl.mosaic.blocks import BLOCK_KEYS
from jax_impl.mosaic.layouts import (
    KEY,
    KEYS_PER_STEP,
    SCALAR,
    THREADS_PER_KEY,
    TILE_BYTES,
    Ref,
    threads_per_key,
)
from jax_impl.mosaic.ptx import BF16_BYTES, MATMUL_REF, REF
from jax_impl.prefill.sparse.kernel_sm90.problem import TILE_HEADS

_STEPS = BLOCK_KEYS // KEYS_PER_STEP
_CHUNK = 16  # bytes that one cp.async moves
_CACHE_LINE = 128
_I32 = 4


def _key_in_step(sharers: int = THREADS_PER_KEY) -> ir.Value:
    """The key of a step that this thread serves, when `sharers` threads share a key."""
    return arith.divui(ptx.thread(), ptx.constant(sharers))


def _place_at_key(sharers: int = THREADS_PER_KEY) -> ir.Value:
    """Which of the threads that share a key this one is."""
    return arith.remui(ptx.thread(), ptx.constant(sharers))


def load_indices(indices_gmem: Ref, token: Any, first_slot: Any, layout: Any) -> Any:
    """The indices of one block of a token's list, [64] int32, in one of the layouts of keys."""
    row_bytes = indices_gmem.shape[1] * _I32
    sharers = threads_per_key(layout)
    keys_per_step = ptx.WARPGROUP // sharers

    @ptx.inline(REF, SCALAR, SCALAR, returns=ptx.array_type((BLOCK_KEYS,), jnp.int32, layout))
    def lower(_, indices, token, first_slot):
        address = ptx.plus(
            ptx.gmem_address(indices),
            ptx.times(ptx.wide(ptx.scalar(token)), row_bytes),
            ptx.times(ptx.scalar(first_slot), _I32),
            ptx.times(_key_in_step(sharers), _I32),
        )
        return registers.keys_of(
            [
                ptx.asm(
                    f"ld.global.nc.b32 $0, [$1+{first_key * _I32}];",
                    [address],
                    "=r,l",
                    ptx.i32(),
                )
                for first_key in range(0, BLOCK_KEYS, keys_per_step)
            ],
            layout,
        )

    return lower(indices_gmem, token, first_slot)


def publish(values_smem: Ref, values: Any, layout: Any) -> None:
    """Stores one float32 per key; visible to whoever waits for this warpgroup's arrival."""
    sharers = threads_per_key(layout)
    step_bytes = ptx.WARPGROUP // sharers * 4

    @ptx.inline(REF, layout)
    def lower(_, ref, values):
        address = ptx.plus(ptx.smem_address(ref), ptx.times(_key_in_step(sharers), 4))
        with ptx.only_if(ptx.equals(_place_at_key(sharers), 0)):
            for step, value in enumerate(registers.key_values(values)):
                ptx.asm(f"st.shared.f32 [$0+{step * step_bytes}], $1;", [address, value], "r,f")

    lower(values_smem, values)


def copy_columns(
    kv_gmem: Ref,
    kv_smem: Ref,
    slot: int,
    *,
    tiles: Sequence[int],
    rows: Any,
    valid: Any,
    l2_prefetch: str,
) -> None:
    """Starts the copy of some 64-column tiles of a block's rows; zeros where not valid."""
    d_qk = kv_gmem.shape[1]
    row_bytes = d_qk * BF16_BYTES
    tile_row_bytes = row_bytes * 8
    prefetch = f".L2::{l2_prefetch}" if l2_prefetch else ""

    @ptx.inline(REF, MATMUL_REF, KEY, KEY)
    def lower(_, kv, kv_smem, rows, valid):
        key, place = _key_in_step(), _place_at_key()
        # A slot is stored in tiles of 8 rows by 64 columns; the 16-byte pieces of a row are
        # permuted by the row's number, so that neither side meets a bank conflict.
        key_in_tile = ptx.bits(key, 7)
        target = ptx.plus(
            ptx.smem_address(kv_smem),
            ptx.times(ptx.shift_right(key, 3), tile_row_bytes),
            ptx.times(key_in_tile, _CACHE_LINE),
            ptx.times(arith.xori(place, key_in_tile), _CHUNK),
        )
        piece = ptx.plus(ptx.gmem_address(kv), ptx.times(place, _CHUNK))
        # Rows are read by several tiles, everything else once.
        policy = ptx.asm(
            "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", [], "=l", ptx.i64(), pure=True
        )
        numbers, flags = registers.key_values(rows), registers.key_values(valid)
        for step in range(_STEPS):
            source = ptx.plus(piece, ptx.times(ptx.wide(numbers[step]), row_bytes))
            size = arith.select(flags[step], ptx.constant(_CHUNK), ptx.constant(0))
            first = slot * BLOCK_KEYS * row_bytes + step * (KEYS_PER_STEP // 8) * tile_row_bytes
            for tile in tiles:
                ptx.asm(
                    f"cp.async.cg.shared.global.L2::cache_hint{prefetch} "
                    f"[$0+{first + tile * TILE_BYTES}], [$1+{tile * _CACHE_LINE}], "
                    f"{_CHUNK}, $2, $3;",
                    [target, source, size, policy],
                    "r,l,r,l",
                )

    if len(tiles):
        lower(kv_gmem, kv_smem, rows, valid)


def prefetch_queries(q_gmem: Ref, tile_number: Any) -> None:
    """Asks L2 for the queries of a tile, by its number in the whole of q."""
    tile_bytes = TILE_HEADS * q_gmem.shape[2] * BF16_BYTES
    thread_bytes = tile_bytes // ptx.WARPGROUP

    @ptx.inline(REF, SCALAR)
    def lower(_, q, tile_number):
        address = ptx.plus(
            ptx.gmem_address(q),
            ptx.times(ptx.wide(ptx.scalar(tile_number)), tile_bytes),
            ptx.times(ptx.anew(ptx.thread()), thread_bytes),  # once a tile: not worth a register
        )
        for offset in range(0, thread_bytes, _CACHE_LINE):
            ptx.asm(f"prefetch.global.L2 [$0+{offset}];", [address], "l")

    lower(q_gmem, tile_number)


def prefetch_rows(
    kv_gmem: Ref, indices: Sequence[Any], exists: Sequence[Any], tile_number: Any, sharers: int
) -> None:
    """Asks L2 for this tile's share of the rows of a pair of blocks.

    `sharers` tiles of consecutive numbers need the same rows; each asks for every
    `sharers`-th.
    """
    row_bytes = kv_gmem.shape[1] * BF16_BYTES
    count = len(indices)

    @ptx.inline(REF, SCALAR, *[KEY] * (2 * count))
    def lower(_, kv, tile_number, *arrays):
        rows = [v for array in arrays[:count] for v in registers.key_values(array)]
        flags = [v for array in arrays[count:] for v in registers.key_values(array)]
        # The threads of a key hold the same rows, one for each of them: the p-th asks for the
        # p-th.
        assert len(rows) == THREADS_PER_KEY
        place = _place_at_key()
        row, wanted = rows[0], flags[0]
        for other in range(1, THREADS_PER_KEY):
            mine = ptx.equals(place, other)
            row = arith.select(mine, rows[other], row)
            wanted = arith.select(mine, flags[other], wanted)
        share = arith.remui(ptx.scalar(tile_number), ptx.constant(sharers))
        is_mine = arith.cmpi(
            arith.CmpIPredicate.eq, arith.remui(place, ptx.constant(sharers)), share
        )
        wanted = arith.andi(wanted, is_mine)
        row = arith.select(wanted, row, ptx.constant(0))
        address = ptx.plus(ptx.gmem_address(kv), ptx.times(ptx.wide(row), row_bytes))
        ptx.asm(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $1, 0; "
            f"@wanted cp.async.bulk.prefetch.L2.global [$0], {row_bytes}; }}",
            [address, ptx.as_i32(wanted)],
            "l,r",
        )

    lower(kv_gmem, tile_number, *indices, *exists)
