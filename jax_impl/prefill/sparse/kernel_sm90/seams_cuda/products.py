"""Matrix products: issued one group at a time, and waited for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic import ptx, registers, wgmma
from jax_impl.mosaic.layouts import MATMUL_TRANSFORMS, MATRIX
from jax_impl.mosaic.ptx import MATMUL_REF
from jax_impl.prefill.sparse.kernel_sm90.problem import (
    BLOCK_KEYS,
    SIDE_COLUMNS,
    TILE_HEADS,
    Problem,
)

_DEPTH_STEPS = BLOCK_KEYS // wgmma.DEPTH
_ACCUMULATOR = ptx.array_type((TILE_HEADS, SIDE_COLUMNS), jnp.float32, MATRIX)


def matmul_scratch(shape: tuple[int, ...]) -> Any:
    """A bfloat16 matrix that the tensor core can read."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=MATMUL_TRANSFORMS)


def start_scores(
    scores: Any, q_smem: Sequence[Any], keys_smem: Any, tiles: Sequence[int], problem: Problem
) -> Any:
    """scores + Q K^T over some column tiles, as one group; scores None: from zero.

    The result may be used after finish_products has named it.
    """
    split = problem.right_tiles.start
    widths = (SIDE_COLUMNS, problem.d_qk - SIDE_COLUMNS)

    def lower(_, *arguments):
        *before, q_left, q_right, keys = arguments
        values = registers.matrix_values(before[0]) if before else None
        if not before:
            wgmma.order_registers()
        q_parts = [
            wgmma.SmemMatrix.of(ref, width)
            for ref, width in zip((q_left, q_right), widths, strict=True)
        ]
        keys = wgmma.SmemMatrix.of(keys, problem.d_qk)
        for tile in tiles:
            part, first_tile = (0, 0) if tile < split else (1, split)
            for step in range(problem.steps_per_tile):
                values = wgmma.multiply(
                    values,
                    BLOCK_KEYS,
                    q_parts[part].depth_along_columns(tile - first_tile, step),
                    keys.depth_along_columns(tile, step),
                    b_transposed=False,
                )
        assert values is not None  # there is a tile
        wgmma.commit()
        return registers.matrix_of(values, BLOCK_KEYS)

    carried = [] if scores is None else [scores]
    returns = ptx.array_type((TILE_HEADS, BLOCK_KEYS), jnp.float32, MATRIX)
    types = [MATRIX] * len(carried) + [MATMUL_REF] * 3
    return ptx.inline(*types, returns=returns)(lower)(*carried, *q_smem, keys_smem)


def _accumulate(
    accumulator: Any, first_operands: Sequence[Any], values: Any, side: int, problem: Problem
):
    """Emits accumulator + weights times one side's values, as one group."""
    matrix = wgmma.SmemMatrix.of(values, problem.d_qk)
    first_tile = problem.value_tiles(side).start
    sums = registers.matrix_values(accumulator)
    for step, weights in enumerate(first_operands):
        sums = wgmma.multiply(
            sums,
            SIDE_COLUMNS,
            weights,
            matrix.depth_along_rows(first_tile, step),
            b_transposed=True,
        )
    wgmma.commit()
    return registers.matrix_of(sums, SIDE_COLUMNS)


def start_values_of_registers(
    acc: Any, weights: Any, values_smem: Any, side: int, problem: Problem
) -> Any:
    """acc + weights [64, 64] times one side's values of a slot, as one group."""

    @ptx.inline(MATRIX, MATRIX, MATMUL_REF, returns=_ACCUMULATOR)
    def lower(_, acc, weights, values):
        (weights,) = wgmma.pin(weights)
        (acc,) = wgmma.pin(acc)
        wgmma.order_registers()
        operands = [wgmma.a_registers(weights, step) for step in range(_DEPTH_STEPS)]
        return _accumulate(acc, operands, values, side, problem)

    return lower(acc, weights, values_smem)


def start_values_of_smem(
    acc: Any, weights_smem: Any, values_smem: Any, side: int, problem: Problem
) -> Any:
    """The same with weights that have been handed over in shared memory."""

    @ptx.inline(MATRIX, MATMUL_REF, MATMUL_REF, returns=_ACCUMULATOR)
    def lower(_, acc, weights, values):
        (acc,) = wgmma.pin(acc)
        wgmma.order_registers()
        matrix = wgmma.SmemMatrix.of(weights, problem.weights_columns)
        operands = [
            matrix.depth_along_columns(problem.weights_tile, step) for step in range(_DEPTH_STEPS)
        ]
        return _accumulate(acc, operands, values, side, problem)

    return lower(acc, weights_smem, values_smem)


def finish_products(in_flight: int, *arrays: Any) -> list[Any]:
    """Waits until at most `in_flight` of the newest groups are running; returns the arrays."""
    types = [ptx.array_type(array.shape, jnp.float32, MATRIX) for array in arrays]

    @ptx.inline(*[MATRIX] * len(arrays), returns=types)
    def lower(_, *arrays):
        wgmma.wait(in_flight)
        return wgmma.pin(*arrays) if arrays else []

    return lower(*arrays)
