"""What becomes of an accumulator and its rows: results in global memory."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from jax_impl.mosaic import ptx, registers
from jax_impl.mosaic.layouts import MATRIX, ROW, Ref
from jax_impl.mosaic.ptx import BF16_BYTES, REF

_STORE_BYTES = 16  # to a thread: four threads then write whole sectors


def store_output(out_gmem: Ref, out: Any) -> None:
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


def store_rows(rows_gmem: Ref, rows: Any) -> None:
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
