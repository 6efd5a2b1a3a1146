"""How arrays are spread over the 128 threads of a warpgroup.

A kernel body names these layouts; Pallas' interpreter has no threads and ignores them.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

type Ref = Any
"""Memory that a kernel reads or writes: a ref of Pallas, or the address that it is lowered to."""

type Register = Any
"""An array that a warpgroup holds in its registers, or a number that all its threads hold."""

_WARPS, _LANES = 4, 32


def _key_layout(sharers: int) -> Any:
    keys_per_warp = _LANES // sharers
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((64,), (_WARPS * keys_per_warp,), (keys_per_warp,), (1,))),
        warp_dims=(-3,),
        lane_dims=(-2, fragmented_array.Replicated(sharers)),
        vector_dim=-1,
    )


# A 64-row accumulator of the tensor core, and what is left of it after a reduction over its
# columns (one value a row) or over its rows (one value a column).
MATRIX = plgpu.Layout.WGMMA
ROW = MATRIX.reduce(1)
COLUMN = MATRIX.reduce(0)

# One value that all threads hold.
SCALAR = plgpu.Layout.WG_SPLAT

# One value per key of a 64-key block: eight neighbouring threads share a key, because the
# eight of them copy its row (16 bytes each), and a thread serves keys 16 apart.
KEYS_PER_STEP = 16
THREADS_PER_KEY = 8
KEY = _key_layout(THREADS_PER_KEY)

# The same with four threads to a key, and the keys of a thread 32 apart.
QUAD_KEY = _key_layout(4)


def threads_per_key(layout: Any) -> int:
    """How many neighbouring threads hold the same value of one of the layouts above."""
    return {KEY: THREADS_PER_KEY, QUAD_KEY: 4}[layout]


# Matrices in shared memory as the tensor core reads them: tiles of 8 rows by 64 bfloat16
# columns, 128 bytes a row, the 16-byte pieces of a row permuted by its number.
MATMUL_TRANSFORMS = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
TILE_COLUMNS = 64
TILE_BYTES = 1024
