"""The static extents of one launch, and how a key block is cut into column chunks."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from jax_impl.mosaic.blocks import BLOCK_KEYS, D_V, LEFT, SIDE_COLUMNS

D = 576
ROPE_COLUMNS = D - D_V
CHUNK_COLUMNS = 128  # columns of a block that are copied, and given back, together
CHUNKS = D_V // CHUNK_COLUMNS

CLUSTER_AXIS = "cluster"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch.

    num_rows: (token, head) rows.
    heads: rows of a token.
    num_pages, page_size, max_pages: extents of the cache and of a row of the block table.
    num_requests: rows of the block table.
    num_workers: thread blocks, or clusters of them, that items are dealt to.
    cluster: thread blocks that walk over the same keys.
    num_partials: unfinished tiles that there is room for.
    widened: the cache is float8 and widened to bfloat16 on its way into shared memory.
    out_dtype: of the finished output.
    """

    num_rows: int
    heads: int
    num_pages: int
    page_size: int
    max_pages: int
    num_requests: int
    num_workers: int
    cluster: int
    num_partials: int
    widened: bool
    out_dtype: Any

    @property
    def multicast(self) -> bool:
        """Whether the thread blocks of a cluster copy keys for one another."""
        return self.cluster > 1 and not self.widened

    @property
    def most_keys(self) -> int:
        """Keys that the block table has room for."""
        return self.max_pages * self.page_size

    @property
    def rows_per_copy(self) -> int:
        """Keys of a block that lie on one page."""
        return min(self.page_size, BLOCK_KEYS)

    @property
    def pages_per_block(self) -> int:
        return BLOCK_KEYS // self.rows_per_copy


def chunks_of(side: int) -> tuple[int, int]:
    """The chunks that hold the values of one consumer's columns."""
    return (0, 1) if side == LEFT else (2, 3)


def chunk_columns(chunk: int) -> pl.Slice:
    return pl.ds(chunk * CHUNK_COLUMNS, CHUNK_COLUMNS)


def side_columns(side: int) -> pl.Slice:
    return pl.ds(side * SIDE_COLUMNS, SIDE_COLUMNS)


ROPE = pl.ds(D_V, ROPE_COLUMNS)
