"""The static extents of one launch, and how its work is cut into tiles."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from jax_impl.mosaic.blocks import BLOCK_KEYS, D_V, SIDE_COLUMNS, TILE_ROWS
from jax_impl.mosaic.layouts import TILE_COLUMNS

TILE_HEADS = TILE_ROWS  # a row is one head of a tile's token
PLAIN_TILE = D_V // TILE_COLUMNS - 1  # of a paged token: its one tile of bfloat16
STEP_COLUMNS = 16  # of a tile of queries or keys that one matrix instruction consumes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """A paged cache of V4 tokens. Its slots are numbered behind those of the caches before it."""

    num_slots: int
    page_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch. Heads and top-k are already padded to multiples of 64 and 128.

    pages: the caches that the keys lie in; none for rows of a bfloat16 matrix.
    """

    num_tokens: int
    num_heads: int
    d_qk: int
    num_kv: int
    topk: int
    pages: tuple[Pages, ...] = ()

    @property
    def head_tiles(self) -> int:
        """Tiles that share a token, and so its keys."""
        return self.num_heads // TILE_HEADS

    @property
    def num_tiles(self) -> int:
        return self.num_tokens * self.head_tiles

    @property
    def column_tiles(self) -> int:
        """64-column tiles of a KV row."""
        return self.d_qk // TILE_COLUMNS

    @property
    def steps_per_tile(self) -> int:
        return TILE_COLUMNS // STEP_COLUMNS

    @property
    def left_tiles(self) -> range:
        return range(0, SIDE_COLUMNS // TILE_COLUMNS)

    @property
    def right_tiles(self) -> range:
        return range(SIDE_COLUMNS // TILE_COLUMNS, D_V // TILE_COLUMNS)

    @property
    def rope_tiles(self) -> range:
        """Columns that take part in the scores only; empty for D = 512."""
        return range(D_V // TILE_COLUMNS, self.column_tiles)

    @property
    def weights_in_rope(self) -> bool:
        """Whether a block's weights take the place of its own rope columns.

        These columns are dead once the block's scores are known, and with D = 576 there is no
        other shared memory left for the weights.
        """
        return bool(self.rope_tiles)

    @property
    def columns_from_right(self) -> pl.Slice:
        """All columns but the left side's, as one slice."""
        return pl.ds(SIDE_COLUMNS, self.d_qk - SIDE_COLUMNS)

    @property
    def rope_columns(self) -> pl.Slice:
        return pl.ds(D_V, self.d_qk - D_V)

    @property
    def weights_tile(self) -> int:
        """The column tile at which handed-over weights start, where they are kept."""
        return self.rope_tiles.start if self.weights_in_rope else 0

    @property
    def weights_columns(self) -> int:
        """The width of the matrix in which handed-over weights are kept."""
        return self.d_qk if self.weights_in_rope else BLOCK_KEYS

    def value_tiles(self, side: int) -> range:
        return (self.left_tiles, self.right_tiles)[side]
