"""Which parts of shared memory the matrix products take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax_impl.decode.kernel_sm90.problem import CHUNK_COLUMNS, CHUNKS, D
from jax_impl.mosaic import products, wgmma
from jax_impl.mosaic.blocks import SIDE_COLUMNS
from jax_impl.mosaic.layouts import TILE_COLUMNS, Ref, Register
from jax_impl.mosaic.wgmma import Operand, SmemMatrix

_STEPS_PER_TILE = TILE_COLUMNS // wgmma.DEPTH
_TILES_PER_SIDE = SIDE_COLUMNS // TILE_COLUMNS


def start_scores(scores: Register, q_smem: Sequence[Ref], keys_smem: Ref, chunk: int) -> Any:
    """scores + Q K^T over one chunk of columns, as one group; scores None: from zero.

    The result may be used after finish_products has named it.
    """
    columns = keys_smem.shape[-1]
    first_tile = chunk * CHUNK_COLUMNS // TILE_COLUMNS
    side = min(first_tile // _TILES_PER_SIDE, 1)
    width = (SIDE_COLUMNS, D - SIDE_COLUMNS)[side]
    first_of_side = first_tile - side * _TILES_PER_SIDE
    assert chunk < CHUNKS or columns == TILE_COLUMNS

    def steps(queries: Any, keys: Any) -> Iterator[tuple[Operand, Operand]]:
        queries, keys = SmemMatrix.of(queries, width), SmemMatrix.of(keys, columns)
        for tile in range(columns // TILE_COLUMNS):
            for step in range(_STEPS_PER_TILE):
                yield (
                    queries.depth_along_columns(first_of_side + tile, step),
                    keys.depth_along_columns(tile, step),
                )

    return products.add_scores(scores, [q_smem[side], keys_smem], steps)


def _values(*chunks: Any) -> Iterator[tuple[SmemMatrix, int]]:
    for chunk in chunks:
        yield SmemMatrix.of(chunk, CHUNK_COLUMNS), 0


def start_values_of_registers(acc: Register, weights: Register, *chunks_smem: Ref) -> Any:
    """acc + weights [64, 64] times the values of some chunks, as one group per chunk."""
    return products.add_values_of_registers(acc, weights, chunks_smem, _values)


def start_values_of_smem(acc: Register, weights_smem: Ref, *chunks_smem: Ref) -> Any:
    """The same with weights that have been handed over in shared memory."""
    return products.add_values_of_smem(acc, weights_smem, chunks_smem, _values)
