"""Matrix products: issued one group at a time, and waited for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jax_impl.decode.kernel_sm90.problem import (
    CHUNK_COLUMNS,
    CHUNKS,
    SIDE_COLUMNS,
    TILE_COLUMNS,
    D,
)
from jax_impl.decode.kernel_sm90.work import BLOCK_KEYS, TILE_ROWS
from jax_impl.mosaic import ptx, registers, wgmma
from jax_impl.mosaic.layouts import MATMUL_TRANSFORMS, MATRIX
from jax_impl.mosaic.ptx import MATMUL_REF

_DEPTH_STEPS = BLOCK_KEYS // wgmma.DEPTH
_STEPS_PER_TILE = TILE_COLUMNS // wgmma.DEPTH
_TILES_PER_SIDE = SIDE_COLUMNS // TILE_COLUMNS
_ACCUMULATOR = ptx.array_type((TILE_ROWS, SIDE_COLUMNS), jnp.float32, MATRIX)


def matmul_scratch(shape: tuple[int, ...]) -> Any:
    """A bfloat16 matrix that the tensor core can read."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=MATMUL_TRANSFORMS)


def start_scores(scores: Any, q_smem: Sequence[Any], keys_smem: Any, chunk: int) -> Any:
    """scores + Q K^T over one chunk of columns, as one group; scores None: from zero.

    The result may be used after finish_products has named it.
    """
    columns = keys_smem.shape[-1]
    first_tile = chunk * CHUNK_COLUMNS // TILE_COLUMNS
    side = min(first_tile // _TILES_PER_SIDE, 1)
    width = (SIDE_COLUMNS, D - SIDE_COLUMNS)[side]
    assert chunk < CHUNKS or columns == TILE_COLUMNS

    def lower(_, *arguments):
        *before, queries, keys = arguments
        values = registers.matrix_values(before[0]) if before else None
        if not before:
            wgmma.order_registers()
        queries = wgmma.SmemMatrix.of(queries, width)
        keys = wgmma.SmemMatrix.of(keys, columns)
        for tile in range(columns // TILE_COLUMNS):
            for step in range(_STEPS_PER_TILE):
                values = wgmma.multiply(
                    values,
                    BLOCK_KEYS,
                    queries.depth_along_columns(first_tile - side * _TILES_PER_SIDE + tile, step),
                    keys.depth_along_columns(tile, step),
                    b_transposed=False,
                )
        assert values is not None  # there is a tile
        wgmma.commit()
        return registers.matrix_of(values, BLOCK_KEYS)

    carried = [] if scores is None else [scores]
    returns = ptx.array_type((TILE_ROWS, BLOCK_KEYS), jnp.float32, MATRIX)
    types = [MATRIX] * len(carried) + [MATMUL_REF] * 2
    return ptx.inline(*types, returns=returns)(lower)(*carried, q_smem[side], keys_smem)


def _accumulate(
    accumulator: mgpu.FragmentedArray, weights: Sequence[Any], chunks: Sequence[ir.Value]
) -> mgpu.FragmentedArray:
    """Emits accumulator + weights times the values of each chunk, as one group per chunk."""
    sums = registers.matrix_values(accumulator)
    count = CHUNK_COLUMNS // 2  # of the accumulator's registers
    for number, chunk in enumerate(chunks):
        matrix = wgmma.SmemMatrix.of(chunk, CHUNK_COLUMNS)
        part = slice(number * count, (number + 1) * count)
        for step, operand in enumerate(weights):
            sums[part] = wgmma.multiply(
                sums[part],
                CHUNK_COLUMNS,
                operand,
                matrix.depth_along_rows(0, step),
                b_transposed=True,
            )
        wgmma.commit()
    return registers.matrix_of(sums, SIDE_COLUMNS)


def start_values_of_registers(acc: Any, weights: Any, *chunks_smem: Any) -> Any:
    """acc + weights [64, 64] times the values of some chunks, as one group per chunk."""

    @ptx.inline(MATRIX, MATRIX, *[MATMUL_REF] * len(chunks_smem), returns=_ACCUMULATOR)
    def lower(_, acc, weights, *chunks):
        (weights,) = wgmma.pin(weights)
        (acc,) = wgmma.pin(acc)
        wgmma.order_registers()
        operands = [wgmma.a_registers(weights, step) for step in range(_DEPTH_STEPS)]
        return _accumulate(acc, operands, chunks)

    return lower(acc, weights, *chunks_smem)


def start_values_of_smem(acc: Any, weights_smem: Any, *chunks_smem: Any) -> Any:
    """The same with weights that have been handed over in shared memory."""

    @ptx.inline(MATRIX, MATMUL_REF, *[MATMUL_REF] * len(chunks_smem), returns=_ACCUMULATOR)
    def lower(_, acc, weights, *chunks):
        (acc,) = wgmma.pin(acc)
        wgmma.order_registers()
        matrix = wgmma.SmemMatrix.of(weights, BLOCK_KEYS)
        operands = [matrix.depth_along_columns(0, step) for step in range(_DEPTH_STEPS)]
        return _accumulate(acc, operands, chunks)

    return lower(acc, weights_smem, *chunks_smem)


def finish_products(in_flight: int, *arrays: Any) -> list[Any]:
    """Waits until at most `in_flight` of the newest groups are running; returns the arrays."""
    types = [ptx.array_type(array.shape, jnp.float32, MATRIX) for array in arrays]

    @ptx.inline(*[MATRIX] * len(arrays), returns=types)
    def lower(_, *arrays):
        wgmma.wait(in_flight)
        return wgmma.pin(*arrays) if arrays else []

    return lower(*arrays)
