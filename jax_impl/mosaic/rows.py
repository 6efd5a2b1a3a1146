"""Seams of a kernel's row values on the hardware: votes, sums, and boxes in shared memory.

Each function has a namesake in rows_interpret.py. Docstrings stand here.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_impl.mosaic import ptx, registers
from jax_impl.mosaic.blocks import TILE_ROWS
from jax_impl.mosaic.layouts import MATRIX, ROW, Ref, Register
from jax_impl.mosaic.ptx import MATMUL_REF, REF

BOX_WORDS = ptx.WARPGROUP * registers.ROW_HALVES
_CONSTRAINTS = {jnp.dtype(jnp.float32): "f", jnp.dtype(jnp.int32): "r"}
ROWS = ptx.array_type((TILE_ROWS,), jnp.float32, ROW)


def any_row(condition: Register) -> Any:
    """1 if the condition holds in a row of the calling warp (interpreter: of the tile)."""

    @ptx.inline(ROW, returns=ptx.SCALAR_I32)
    def lower(_, condition):
        first, second = registers.row_values(condition)
        return ptx.splat(registers.any_in_warp(arith.ori(first, second)))

    return lower(condition)


def row_partial_sums(matrix: Register) -> Any:
    """Sums over the columns that a thread holds: quad_sum of the result is the row's sum."""

    @ptx.inline(MATRIX, returns=ROWS)
    def lower(_, matrix):
        sums = []
        for half in range(registers.ROW_HALVES):
            values = [
                registers.element(registers.pair(matrix, group, half), position)
                for group in range(matrix.shape[1] // registers.COLUMNS_PER_REGISTER_PAIR)
                for position in range(2)
            ]
            total = values[0]
            for value in values[1:]:
                total = arith.addf(total, value)
            sums.append(total)
        return registers.rows_of(sums)

    return lower(matrix)


def quad_sum(rows: Register) -> Any:
    """Adds up what the threads of a row hold of it."""

    @ptx.inline(ROW, returns=ROWS)
    def lower(_, rows):
        return registers.rows_of([registers.quad_sum(v) for v in registers.row_values(rows)])

    return lower(rows)


def _box_address(box: ir.Value) -> ir.Value:
    return ptx.plus(ptx.smem_address(box), ptx.times(ptx.thread(), registers.ROW_HALVES * 4))


def put_rows(box_smem: Ref, rows: Register) -> None:
    """Leaves 32 bits per row for a warpgroup that holds the same rows per thread."""
    kind = _CONSTRAINTS[jnp.dtype(rows.dtype)]

    @ptx.inline(REF, ROW)
    def lower(_, box, rows):
        values = registers.row_values(rows)
        ptx.asm(
            "st.shared.v2.b32 [$0], {$1, $2};", [_box_address(box), *values], f"r,{kind},{kind}"
        )

    lower(box_smem, rows)


def get_rows(box_smem: Ref) -> Any:
    """What put_rows has left."""
    dtype = jnp.dtype(box_smem.dtype)
    kind = _CONSTRAINTS[dtype]

    @ptx.inline(REF, returns=ptx.array_type((TILE_ROWS,), dtype, ROW))
    def lower(_, box):
        element = ptx.f32() if kind == "f" else ptx.i32()
        both = ptx.asm(
            "ld.shared.v2.b32 {$0, $1}, [$2];",
            [_box_address(box)],
            f"={kind},={kind},r",
            ptx.struct(element, 2),
        )
        values = ptx.unpack(both, element, 2)
        return registers.rows_of(values, is_signed=None if kind == "f" else True)

    return lower(box_smem)


def store_weights(place_smem: Ref, weights: Register) -> None:
    """Stores weights [64, 64] where the tensor core can read them."""

    @ptx.inline(MATMUL_REF, MATRIX)
    def lower(_, place, weights):
        weights.store_tiled(place, swizzle=128)

    lower(place_smem, weights)
