"""Which parts of shared memory the matrix products take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_impl.mosaic import products
from jax_impl.mosaic.blocks import SIDE_COLUMNS
from jax_impl.mosaic.layouts import Ref, Register
from jax_impl.mosaic.wgmma import Operand, SmemMatrix
from jax_impl.prefill.sparse.kernel_sm90.problem import Problem


def start_scores(
    scores: Register, q_smem: Sequence[Ref], keys_smem: Ref, tiles: Sequence[int], problem: Problem
) -> Any:
    """scores + Q K^T over some column tiles, as one group; scores None: from zero.

    The result may be used after finish_products has named it.
    """
    split = problem.right_tiles.start

    def steps(q_left: Any, q_right: Any, keys: Any) -> Iterator[tuple[Operand, Operand]]:
        left = SmemMatrix.of(q_left, SIDE_COLUMNS)
        right = SmemMatrix.of(q_right, problem.d_qk - SIDE_COLUMNS)
        keys = SmemMatrix.of(keys, problem.d_qk)
        for tile in tiles:
            part, first_tile = (left, 0) if tile < split else (right, split)
            for step in range(problem.steps_per_tile):
                queries = part.depth_along_columns(tile - first_tile, step)
                yield queries, keys.depth_along_columns(tile, step)

    return products.add_scores(scores, [*q_smem, keys_smem], steps)


def _values(side: int, problem: Problem) -> Callable[[Any], list[tuple[SmemMatrix, int]]]:
    tile = problem.value_tiles(side).start
    return lambda slot: [(SmemMatrix.of(slot, problem.d_qk), tile)]


def start_values_of_registers(
    acc: Register, weights: Register, values_smem: Ref, side: int, problem: Problem
) -> Any:
    """acc + weights [64, 64] times one side's values of a slot, as one group."""
    return products.add_values_of_registers(acc, weights, [values_smem], _values(side, problem))


def start_values_of_smem(
    acc: Register, weights_smem: Ref, values_smem: Ref, side: int, problem: Problem
) -> Any:
    """The same with weights that have been handed over in shared memory."""
    return products.add_values_of_smem(
        acc, weights_smem, [values_smem], _values(side, problem),
        columns=problem.weights_columns, tile=problem.weights_tile,
    )  # fmt: skip
