"""Matrix products of the tensor core, issued by hand.

Pallas' wgmma is not used, for two reasons. It commits once per call, so that a product can't be
started on the columns that have arrived while the rest is on its way. And its matrix
descriptors are 64-bit values that LLVM computes ahead of the loops: a hundred of them do not
fit into registers next to the accumulators, and every product then waits for a reload from
local memory. Here an operand is one 32-bit base; offsets are added, and the descriptor is put
together, inside the assembly text, where LLVM does not see them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

from jax_impl.mosaic import ptx, registers
from jax_impl.mosaic.layouts import TILE_BYTES, TILE_COLUMNS

# Columns of A (and rows of B) that one instruction consumes.
DEPTH = 16

_SWIZZLE_128 = 1 << 30  # in the upper half of a descriptor


@dataclasses.dataclass(frozen=True)
class SmemMatrix:
    """A matrix in shared memory, stored in tiles of 8 rows by 64 columns."""

    base: ir.Value  # its address in units of 16 bytes
    tiles_per_row: int

    @classmethod
    def of(cls, ref: ir.Value, columns: int) -> SmemMatrix:
        address = ptx.bits(ptx.smem_address(ref), 0x3FFFF)
        return cls(ptx.shift_right(address, 4), columns // TILE_COLUMNS)

    def depth_along_columns(self, tile: int, step: int) -> Operand:
        """64 rows, and the 16 columns of a step as the summed axis."""
        return Operand(self, tile * TILE_BYTES + step * DEPTH * ptx.BF16_BYTES, 0)

    def depth_along_rows(self, tile: int, step: int) -> Operand:
        """The 16 rows of a step as the summed axis, all columns from `tile` on."""
        first_row_of_tiles = step * (DEPTH // 8) * self.tiles_per_row
        return Operand(self, (first_row_of_tiles + tile) * TILE_BYTES, TILE_BYTES)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Where one instruction finds its part of a matrix."""

    matrix: SmemMatrix
    offset: int  # bytes
    leading: int  # bytes between tiles along the axis that is not summed, when it has several

    def descriptor(self, name: str, base: str) -> str:
        """PTX that assembles this operand's descriptor in the 64-bit register `name`."""
        low = (self.offset >> 4) + (self.leading >> 4 << 16)
        high = (self.matrix.tiles_per_row * TILE_BYTES >> 4) | _SWIZZLE_128
        return f"add.s32 {name}_low, {base}, {low}; mov.b64 {name}, {{{name}_low, {high}}}; "


def multiply(
    accumulator: Sequence[ir.Value] | None,
    columns: int,
    a: Operand | Sequence[ir.Value],
    b: Operand,
    *,
    b_transposed: bool,
) -> list[ir.Value]:
    """accumulator + a b for one step of depth; None starts from zero.

    a: an operand in shared memory, or its four registers. b_transposed: b is stored with the
    summed axis along its rows.
    """
    count = columns // 2
    values = list(accumulator) if accumulator is not None else []
    tied = [str(i) for i in range(len(values))]
    operands: list[ir.Value] = values
    first = count + len(values)  # number of the first asm operand after the accumulator

    declare = ".reg .pred keep; .reg .b32 desc_b_low; .reg .b64 desc_b; "
    prepare = f"setp.{'ne' if accumulator is None else 'eq'}.s32 keep, 0, 0; "
    if isinstance(a, Operand):
        operands = [*operands, a.matrix.base]
        declare += ".reg .b32 desc_a_low; .reg .b64 desc_a; "
        prepare += a.descriptor("desc_a", f"${first}")
        a_text, modifiers, a_operands = "desc_a", "1, 1, 0", 1
    else:
        operands = [*operands, *a]
        a_text, modifiers, a_operands = ptx.names(first, 4), "1, 1", 4
    operands = [*operands, b.matrix.base]
    prepare += b.descriptor("desc_b", f"${first + a_operands}")

    text = (
        f"{{ {declare}{prepare}"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
        f"{ptx.names(0, count)}, {a_text}, desc_b, keep, {modifiers}, {int(b_transposed)}; }}"
    )
    constraints = ",".join(["=f"] * count + tied + ["r"] * (a_operands + 1))
    out = ptx.asm(text, operands, constraints, ptx.struct(ptx.f32(), count))
    return ptx.unpack(out, ptx.f32(), count)


def order_registers() -> None:
    """Must stand between other uses of registers and the first product that uses them."""
    ptx.asm("wgmma.fence.sync.aligned;")


def commit() -> None:
    ptx.asm("wgmma.commit_group.sync.aligned;")


def wait(in_flight: int) -> None:
    """Until at most so many of the newest committed groups are still running."""
    ptx.asm(f"wgmma.wait_group.sync.aligned {in_flight};")


def pin(*arrays: mgpu.FragmentedArray) -> list[mgpu.FragmentedArray]:
    """The same arrays, so that LLVM keeps what uses them behind this place.

    Nothing else ties a wait, or the ordering above, to the registers that it is about.
    """
    pinned: Any = mgpu.fragmented_array.optimization_barrier(*arrays)
    return list(pinned) if len(arrays) > 1 else [pinned]


def a_registers(weights: mgpu.FragmentedArray, step: int) -> list[ir.Value]:
    """The four registers of a bfloat16 matrix that are `a` for one step of depth."""
    return [
        registers.word(weights, 2 * step + group, half)
        for group in range(2)
        for half in range(registers.ROW_HALVES)
    ]
