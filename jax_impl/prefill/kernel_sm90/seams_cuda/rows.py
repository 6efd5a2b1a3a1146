"""What leaves an accumulator: votes, sums, handover to the other consumer, results."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_impl.mosaic import ptx, registers
from jax_impl.mosaic.layouts import MATRIX, ROW
from jax_impl.mosaic.ptx import BF16_BYTES, MATMUL_REF, REF
from jax_impl.prefill.kernel_sm90.problem import TILE_HEADS

ROWS = ptx.array_type((TILE_HEADS,), jnp.float32, ROW)
_STORE_BYTES = 16  # to a thread: four threads then write whole sectors


def any_row(condition: Any) -> Any:
    """1 if the condition holds in a row of the calling warp (interpreter: of the tile)."""

    @ptx.inline(ROW, returns=ptx.SCALAR_I32)
    def lower(_, condition):
        first, second = registers.row_values(condition)
        return ptx.splat(registers.any_in_warp(arith.ori(first, second)))

    return lower(condition)


def row_partial_sums(matrix: Any) -> Any:
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


def quad_sum(rows: Any) -> Any:
    """Adds up what the threads of a row hold of it."""

    @ptx.inline(ROW, returns=ROWS)
    def lower(_, rows):
        return registers.rows_of([registers.quad_sum(v) for v in registers.row_values(rows)])

    return lower(rows)


def _box_address(box: ir.Value) -> ir.Value:
    return ptx.plus(ptx.smem_address(box), ptx.times(ptx.thread(), registers.ROW_HALVES * 4))


def put_rows(box_smem: Any, rows: Any) -> None:
    """Leaves a value per row for the other consumer, who holds the same rows per thread."""

    @ptx.inline(REF, ROW)
    def lower(_, box, rows):
        values = registers.row_values(rows)
        ptx.asm("st.shared.v2.f32 [$0], {$1, $2};", [_box_address(box), *values], "r,f,f")

    lower(box_smem, rows)


def get_rows(box_smem: Any) -> Any:
    @ptx.inline(REF, returns=ROWS)
    def lower(_, box):
        text = "ld.shared.v2.f32 {$0, $1}, [$2];"
        both = ptx.asm(text, [_box_address(box)], "=f,=f,r", ptx.struct(ptx.f32(), 2))
        return registers.rows_of(ptx.unpack(both, ptx.f32(), 2))

    return lower(box_smem)


def store_weights(place_smem: Any, weights: Any) -> None:
    """Stores weights [64, 64] where the tensor core can read them."""

    @ptx.inline(MATMUL_REF, MATRIX)
    def lower(_, place, weights):
        weights.store_tiled(place, swizzle=128)

    lower(place_smem, weights)


def store_output(out_gmem: Any, out: Any) -> None:
    """Writes [64, 256] bfloat16, 16 bytes to a thread, so that sectors are written whole."""

    @ptx.inline(REF, MATRIX)
    def lower(_, ref, out):
        (row_stride, column_stride), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        assert column_stride == 1
        address = ptx.plus(
            ptx.gmem_address(ref),
            ptx.times(registers.row_in_warpgroup(), row_stride * BF16_BYTES),
            ptx.times(registers.lane_in_quad(), _STORE_BYTES),
        )
        groups_per_store = 4
        for group in range(
            0, out.shape[1] // registers.COLUMNS_PER_REGISTER_PAIR, groups_per_store
        ):
            for half in range(registers.ROW_HALVES):
                words = [registers.word(out, group + i, half) for i in range(groups_per_store)]
                offset = half * 8 * row_stride * BF16_BYTES + group * 8 * BF16_BYTES
                ptx.asm(
                    f"st.global.cs.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};",
                    [address, *registers.quad_transpose(words)],
                    "l,r,r,r,r",
                )

    lower(out_gmem, out)


def store_rows(rows_gmem: Any, rows: Any) -> None:
    """Writes one float32 per row."""

    @ptx.inline(REF, ROW)
    def lower(_, ref, rows):
        address = ptx.plus(ptx.gmem_address(ref), ptx.times(registers.row_in_warpgroup(), 4))
        first_lane = ptx.as_i32(ptx.equals(registers.lane_in_quad(), 0))
        for half, value in enumerate(registers.row_values(rows)):
            ptx.asm(
                "{ .reg .pred first; setp.ne.s32 first, $2, 0; "
                f"@first st.global.f32 [$0+{half * 8 * 4}], $1; }}",
                [address, value, first_lane],
                "l,f,r",
            )

    lower(rows_gmem, rows)
