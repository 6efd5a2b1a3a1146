"""What rows see, the zeros behind it, and what becomes of the rows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_impl.decode.kernel_sm90.problem import CHUNK_COLUMNS, Problem
from jax_impl.mosaic import ptx, registers
from jax_impl.mosaic.blocks import D_V, SIDE_COLUMNS, TILE_ROWS
from jax_impl.mosaic.layouts import MATRIX, ROW, SCALAR, TILE_BYTES, TILE_COLUMNS, Ref
from jax_impl.mosaic.ptx import BF16_BYTES, MATMUL_REF, REF

_STORE_BYTES = 16  # to a thread: four threads then write whole sectors
_F32_BYTES = 4
_ROW_OF_TILE_BYTES = TILE_COLUMNS * BF16_BYTES


def load_row_keys(row_keys_gmem: Ref, first_row: Any, problem: Problem) -> Any:
    """How many keys each row of a tile sees; a row that doesn't exist, as the last one does."""

    @ptx.inline(REF, SCALAR, returns=ptx.array_type((TILE_ROWS,), jnp.int32, ROW))
    def lower(_, row_keys, first_row):
        values = []
        for half in range(registers.ROW_HALVES):
            row = ptx.plus(ptx.scalar(first_row), registers.row_in_warpgroup(), half * 8)
            row = arith.minui(row, ptx.constant(problem.num_rows - 1))
            token = arith.divui(row, ptx.constant(problem.heads))
            address = ptx.plus(ptx.gmem_address(row_keys), ptx.times(ptx.wide(token), 4))
            values.append(ptx.asm("ld.global.nc.b32 $0, [$1];", [address], "=r,l", ptx.i32()))
        return registers.rows_of(values, is_signed=True)

    return lower(row_keys_gmem, first_row)


def clear_rows_from(chunk_smem: Ref, first: Any) -> None:
    """Zeroes the rows of a chunk [64, 128] from `first` on (all of them if it is negative)."""
    tiles = CHUNK_COLUMNS // TILE_COLUMNS
    assert TILE_ROWS * tiles == ptx.WARPGROUP  # a thread clears one row of one tile

    @ptx.inline(MATMUL_REF, SCALAR)
    def lower(_, chunk, first):
        row = arith.divui(ptx.thread(), ptx.constant(tiles))
        tile = arith.remui(ptx.thread(), ptx.constant(tiles))
        # The 16-byte pieces of a row are permuted, which a row of zeros doesn't show.
        address = ptx.plus(
            ptx.smem_address(chunk),
            ptx.times(ptx.shift_right(row, 3), tiles * TILE_BYTES),
            ptx.times(tile, TILE_BYTES),
            ptx.times(ptx.bits(row, 7), _ROW_OF_TILE_BYTES),
        )
        behind = arith.cmpi(arith.CmpIPredicate.sge, row, ptx.scalar(first))
        with ptx.only_if(behind):
            for offset in range(0, _ROW_OF_TILE_BYTES, 16):
                ptx.asm(
                    f"st.shared.v4.b32 [$0+{offset}], {{$1, $1, $1, $1}};",
                    [address, ptx.constant(0)],
                    "r,r",
                )

    lower(chunk_smem, first)


def store_output(out_gmem: Ref, first_row: Any, num_rows: Any, side: int, out: Any) -> None:
    """Writes one side's columns [64, 256] of the first num_rows rows, whole sectors at a time."""
    bf16 = jnp.dtype(out.dtype) == jnp.bfloat16
    row_bytes = D_V * (BF16_BYTES if bf16 else _F32_BYTES)

    @ptx.inline(REF, SCALAR, SCALAR, MATRIX)
    def lower(_, ref, first_row, num_rows, out):
        row = registers.row_in_warpgroup()
        address = ptx.plus(
            ptx.gmem_address(ref),
            ptx.times(arith.addi(ptx.wide(ptx.scalar(first_row)), ptx.wide(row)), row_bytes),
            side * (row_bytes * SIDE_COLUMNS // D_V),
        )
        store = _store_bf16 if bf16 else _store_f32
        for half in range(registers.ROW_HALVES):
            wanted = _exists(row, half, num_rows)
            store(ptx.plus(address, half * 8 * row_bytes), wanted, out, half)

    lower(out_gmem, first_row, num_rows, out)


def _exists(row: ir.Value, half: int, num_rows: Any) -> ir.Value:
    row = ptx.plus(row, half * 8)
    return ptx.as_i32(arith.cmpi(arith.CmpIPredicate.slt, row, ptx.scalar(num_rows)))


def _store_bf16(address: ir.Value, wanted: ir.Value, out: Any, half: int) -> None:
    address = ptx.plus(address, ptx.times(registers.lane_in_quad(), _STORE_BYTES))
    at_a_time = 4
    for group in range(0, SIDE_COLUMNS // registers.COLUMNS_PER_REGISTER_PAIR, at_a_time):
        words = [registers.word(out, group + i, half) for i in range(at_a_time)]
        ptx.asm(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $1, 0; "
            f"@wanted st.global.cs.v4.b32 [$0+{group * 8 * BF16_BYTES}], {{$2, $3, $4, $5}}; }}",
            [address, wanted, *registers.quad_transpose(words)],
            "l,r,r,r,r,r",
        )


def _store_f32(address: ir.Value, wanted: ir.Value, out: Any, half: int) -> None:
    address = ptx.plus(address, ptx.times(registers.lane_in_quad(), 2 * _F32_BYTES))
    for group in range(SIDE_COLUMNS // registers.COLUMNS_PER_REGISTER_PAIR):
        register = registers.pair(out, group, half)
        ptx.asm(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $1, 0; "
            f"@wanted st.global.cs.v2.f32 [$0+{group * 8 * _F32_BYTES}], {{$2, $3}}; }}",
            [address, wanted, *(registers.element(register, i) for i in range(2))],
            "l,r,f,f",
        )


def store_rows(rows_gmem: Ref, first_row: Any, num_rows: Any, rows: Any) -> None:
    """Writes one float32 for each of the first num_rows rows."""

    @ptx.inline(REF, SCALAR, SCALAR, ROW)
    def lower(_, ref, first_row, num_rows, rows):
        row = registers.row_in_warpgroup()
        address = ptx.plus(
            ptx.gmem_address(ref),
            ptx.times(ptx.wide(ptx.scalar(first_row)), _F32_BYTES),
            ptx.times(row, _F32_BYTES),
        )
        first_lane = ptx.as_i32(ptx.equals(registers.lane_in_quad(), 0))
        for half, value in enumerate(registers.row_values(rows)):
            ptx.asm(
                "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0; "
                f"@wanted st.global.f32 [$0+{half * 8 * _F32_BYTES}], $1; }}",
                [address, value, arith.andi(first_lane, _exists(row, half, num_rows))],
                "l,f,r",
            )

    lower(rows_gmem, first_row, num_rows, rows)
