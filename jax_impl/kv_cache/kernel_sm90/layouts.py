"""How the rows of a thread block are spread over its warps; and the columns of one over lanes."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kv_cache.kernel_sm90.problem import WARPS
from jax_impl.mosaic import ptx


def rows_layout(count: int) -> Any:
    """One value per row: a warp owns `count` / 4 neighbouring rows, all its lanes hold them."""
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((count,), (count // WARPS,), (1,))),
        warp_dims=(-3,),
        lane_dims=(fragmented_array.Replicated(ptx.WARP),),
        vector_dim=-1,
    )
