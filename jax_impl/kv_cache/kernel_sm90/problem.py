"""What is static of one launch, and how the rows of a workspace are dealt out."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kv_cache.formats import KVFormat, format_named
from jax_impl.mosaic import ptx

WARPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning.

    rows_per_warp: rows whose loads a warp has in flight together, one after another in the
      workspace. Each takes about ten registers of every thread.
    """

    rows_per_warp: int = 4

    def __post_init__(self) -> None:
        if not 2 <= self.rows_per_warp <= 16:
            raise ValueError(f"rows_per_warp must lie in [2, 16]; got {self.rows_per_warp}")

    @property
    def rows_per_block(self) -> int:
        """Of a thread block, which is one warpgroup."""
        return WARPS * self.rows_per_warp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Extents of one launch; all at least 1."""

    kv_format: str
    page_size: int
    num_pages: int
    num_columns: int  # of the block table
    num_requests: int
    num_rows: int  # of the workspace, per request

    @property
    def layout(self) -> KVFormat:
        return format_named(self.kv_format)

    def blocks_per_request(self, config: Config) -> int:
        return -(-self.num_rows // config.rows_per_block)


def rows_layout(count: int) -> Any:
    """One value per row: a warp owns `count` / 4 neighbouring rows, all its lanes hold them."""
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((count,), (count // WARPS,), (1,))),
        warp_dims=(-3,),
        lane_dims=(fragmented_array.Replicated(ptx.WARP),),
        vector_dim=-1,
    )
