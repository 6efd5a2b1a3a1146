"""Arrays as single registers, and moves between the four lanes that share an accumulator row.

In the accumulator layout a warp owns 16 rows, a quad of lanes one row of its upper and one of
its lower eight, and a lane two neighbouring columns out of every eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_impl.mosaic import ptx
from jax_impl.mosaic.layouts import KEY, MATRIX, ROW

ROW_HALVES = 2
COLUMNS_PER_REGISTER_PAIR = 8


def element(register: ir.Value, position: int = 0) -> ir.Value:
    return llvm.extractelement(register, ptx.constant(position))


def _one_vector(value: ir.Value) -> ir.Value:
    return vector.broadcast(ir.VectorType.get((1,), value.type), value)


def pair(array: mgpu.FragmentedArray, column_group: int, row_half: int) -> ir.Value:
    """The register of a matrix that holds this lane's two columns of a group of eight."""
    shape = array.registers.shape
    assert shape[0] == 1 and int(np.prod(shape[2:])) == ROW_HALVES, shape
    return array.registers[0, column_group].reshape(-1)[row_half]


def word(array: mgpu.FragmentedArray, column_group: int, row_half: int) -> ir.Value:
    """The same register of a bfloat16 matrix, as 32 bits."""
    as_words = ir.VectorType.get((1,), ptx.i32())
    return element(mgpu_utils.bitcast(pair(array, column_group, row_half), as_words))


def matrix_values(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """The float32 values of a matrix in the order in which wgmma takes its accumulator."""
    return [
        element(pair(array, group, half), position)
        for group in range(array.shape[1] // COLUMNS_PER_REGISTER_PAIR)
        for half in range(ROW_HALVES)
        for position in range(2)
    ]


def matrix_of(values: Sequence[ir.Value], columns: int) -> mgpu.FragmentedArray:
    """The inverse of `matrix_values`, for 64 rows."""
    layout = MATRIX.to_mgpu()
    registers = np.empty(layout.registers_shape((64, columns)), dtype=object)
    registers.reshape(-1)[:] = [
        mgpu_utils.vector_concat([_one_vector(low), _one_vector(high)])
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def row_values(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """This thread's two values of an array with one value per row."""
    return [element(register) for register in array.registers.flat]


def rows_of(values: Sequence[ir.Value], *, is_signed: bool | None = None) -> mgpu.FragmentedArray:
    """The inverse of `row_values`, for 64 rows; is_signed for integers."""
    layout = ROW.to_mgpu()
    registers = np.empty(layout.registers_shape((64,)), dtype=object)
    registers.reshape(-1)[:] = [_one_vector(value) for value in values]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def key_values(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """This thread's values of an array with one value per key, in the order of their keys."""
    return [element(register) for register in array.registers.flat]


def keys_of(values: Sequence[ir.Value], layout: Any = KEY) -> mgpu.FragmentedArray:
    """The inverse of `key_values`, for 64 int32 keys."""
    layout = layout.to_mgpu()
    registers = np.empty(layout.registers_shape((64,)), dtype=object)
    registers.reshape(-1)[:] = [_one_vector(value) for value in values]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def words_layout(count: int) -> Any:
    """Of an int32 array that stands for `count` words of each thread, whatever they mean."""
    return plgpu.Layout.WG_STRIDED((count * ptx.WARPGROUP,), count)


def words_type(count: int) -> Any:
    return ptx.array_type((count * ptx.WARPGROUP,), jnp.int32, words_layout(count))


def words_of(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """This thread's words of such an array."""
    register = array.registers.reshape(-1)[0]
    count = ir.VectorType(register.type).shape[0]
    return [element(register, i) for i in range(count)]


def array_of_words(words: Sequence[ir.Value]) -> mgpu.FragmentedArray:
    """The inverse of `words_of`."""
    count = len(words)
    array = mgpu.FragmentedArray.splat(
        ptx.constant(0), (count * ptx.WARPGROUP,), words_layout(count).to_mgpu(), is_signed=True
    )
    vector_type = ir.VectorType.get((count,), ptx.i32())
    array.registers.reshape(-1)[0] = vector.from_elements(vector_type, list(words))
    return array


def row_in_warpgroup() -> ir.Value:
    """The first of this thread's two rows; the second is eight further."""
    thread = ptx.thread()
    warp = arith.divui(thread, ptx.constant(ptx.WARP))
    return ptx.plus(ptx.times(warp, 16), ptx.shift_right(ptx.bits(thread, 31), 2))


def lane_in_quad() -> ir.Value:
    return ptx.bits(ptx.thread(), 3)


def shuffle_xor(value: ir.Value, distance: int) -> ir.Value:
    kind = "f" if isinstance(value.type, ir.F32Type) else "r"
    return ptx.asm(
        f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;",
        [value],
        f"={kind},{kind}",
        value.type,
    )


def quad_sum(value: ir.Value) -> ir.Value:
    for distance in (1, 2):
        value = arith.addf(value, shuffle_xor(value, distance))
    return value


def quad_transpose(words: Sequence[ir.Value]) -> list[ir.Value]:
    """Lane i of a quad gives up its words j for the words i of the lanes j.

    Two exchanges with half the words each, as in a 4 x 4 transpose by 2 x 2 blocks: a lane
    then holds 16 bytes of one row that lie side by side.
    """
    lane = lane_in_quad()
    odd = arith.cmpi(arith.CmpIPredicate.ne, ptx.bits(lane, 1), ptx.constant(0))
    high = arith.cmpi(arith.CmpIPredicate.ne, ptx.bits(lane, 2), ptx.constant(0))
    a, b, c, d = words
    ab = shuffle_xor(arith.select(odd, a, b), 1)
    cd = shuffle_xor(arith.select(odd, c, d), 1)
    a, b = arith.select(odd, ab, a), arith.select(odd, b, ab)
    c, d = arith.select(odd, cd, c), arith.select(odd, d, cd)
    ac = shuffle_xor(arith.select(high, a, c), 2)
    bd = shuffle_xor(arith.select(high, b, d), 2)
    return [
        arith.select(high, ac, a),
        arith.select(high, bd, b),
        arith.select(high, c, ac),
        arith.select(high, d, bd),
    ]


def any_in_warp(condition: ir.Value) -> ir.Value:
    """1 in every lane of a warp if the condition holds in one of them, else 0."""
    return ptx.asm(
        "{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0; "
        "vote.sync.any.pred any, mine, 0xffffffff; selp.b32 $0, 1, 0, any; }",
        [ptx.as_i32(condition)],
        "=r,r",
        ptx.i32(),
    )
