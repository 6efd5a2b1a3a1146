"""Matrix products: issued one group at a time, and waited for later.

`matmul_scratch` and `finish_products` are seams of both attention kernels. Which operands a
product takes is a kernel's own: it hands in a function that is called while the product is being
lowered, on the addresses of the refs, and gives matrices and tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic import ptx, registers, wgmma
from jax_impl.mosaic.blocks import BLOCK_KEYS, SIDE_COLUMNS, TILE_ROWS
from jax_impl.mosaic.layouts import MATMUL_TRANSFORMS, MATRIX, Ref, Register
from jax_impl.mosaic.ptx import MATMUL_REF
from jax_impl.mosaic.wgmma import Operand, SmemMatrix

DEPTH_STEPS = BLOCK_KEYS // wgmma.DEPTH
_SCORES = ptx.array_type((TILE_ROWS, BLOCK_KEYS), jnp.float32, MATRIX)
_ACCUMULATOR = ptx.array_type((TILE_ROWS, SIDE_COLUMNS), jnp.float32, MATRIX)


def matmul_scratch(shape: tuple[int, ...]) -> Any:
    """A bfloat16 matrix that the tensor core can read."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=MATMUL_TRANSFORMS)


def add_scores(
    scores: Register, refs: Sequence[Ref], steps: Callable[..., Iterable[tuple[Operand, Operand]]]
) -> Any:
    """scores + Q K^T as one group; scores None: from zero.

    steps: of the refs, queries and keys of each step of depth, one at least. The result may be
    used after finish_products has named it.
    """

    def lower(_, *arguments):
        values = registers.matrix_values(arguments[0]) if carried else None
        if not carried:
            wgmma.order_registers()
        for queries, keys in steps(*arguments[len(carried) :]):
            values = wgmma.multiply(values, BLOCK_KEYS, queries, keys, b_transposed=False)
        assert values is not None  # there is a step
        wgmma.commit()
        return registers.matrix_of(values, BLOCK_KEYS)

    carried = [] if scores is None else [scores]
    types = [MATRIX] * len(carried) + [MATMUL_REF] * len(refs)
    return ptx.inline(*types, returns=_SCORES)(lower)(*carried, *refs)


def add_values_of_registers(
    acc: Register,
    weights: Register,
    refs: Sequence[Ref],
    values: Callable[..., Iterable[tuple[SmemMatrix, int]]],
) -> Any:
    """acc + weights [64, 64] times values.

    values: of the refs, matrices that stand side by side, and the tile at which each begins; they
    are equally wide and become one group each.
    """

    @ptx.inline(MATRIX, MATRIX, *[MATMUL_REF] * len(refs), returns=_ACCUMULATOR)
    def lower(_, acc, weights, *refs):
        (weights,) = wgmma.pin(weights)
        (acc,) = wgmma.pin(acc)
        wgmma.order_registers()
        operands = [wgmma.a_registers(weights, step) for step in range(DEPTH_STEPS)]
        return _accumulate(acc, operands, values(*refs), SIDE_COLUMNS // len(refs))

    return lower(acc, weights, *refs)


def add_values_of_smem(
    acc: Register,
    weights_smem: Ref,
    refs: Sequence[Ref],
    values: Callable[..., Iterable[tuple[SmemMatrix, int]]],
    *,
    columns: int = BLOCK_KEYS,
    tile: int = 0,
) -> Any:
    """The same with weights that have been handed over in shared memory.

    columns, tile: the width of the matrix that holds them, and where they begin.
    """

    @ptx.inline(MATRIX, MATMUL_REF, *[MATMUL_REF] * len(refs), returns=_ACCUMULATOR)
    def lower(_, acc, weights, *refs):
        (acc,) = wgmma.pin(acc)
        wgmma.order_registers()
        matrix = SmemMatrix.of(weights, columns)
        operands = [matrix.depth_along_columns(tile, step) for step in range(DEPTH_STEPS)]
        return _accumulate(acc, operands, values(*refs), SIDE_COLUMNS // len(refs))

    return lower(acc, weights_smem, *refs)


def _accumulate(
    accumulator: Any,
    weights: Sequence[Any],
    values: Iterable[tuple[SmemMatrix, int]],
    columns: int,
) -> Any:
    """Emits accumulator + weights times the values, as one group per `columns` of them."""
    sums = registers.matrix_values(accumulator)
    count = columns // 2  # of the accumulator's registers
    for number, (matrix, tile) in enumerate(values):
        part = slice(number * count, (number + 1) * count)
        for step, operand in enumerate(weights):
            sums[part] = wgmma.multiply(
                sums[part], columns, operand, matrix.depth_along_rows(tile, step), b_transposed=True
            )
        wgmma.commit()
    return registers.matrix_of(sums, SIDE_COLUMNS)


def finish_products(in_flight: int, *arrays: Any) -> list[Any]:
    """Waits until at most `in_flight` of the newest groups are running; returns the arrays."""
    types = [ptx.array_type(array.shape, jnp.float32, MATRIX) for array in arrays]

    @ptx.inline(*[MATRIX] * len(arrays), returns=types)
    def lower(_, *arrays):
        wgmma.wait(in_flight)
        return wgmma.pin(*arrays) if arrays else []

    return lower(*arrays)
