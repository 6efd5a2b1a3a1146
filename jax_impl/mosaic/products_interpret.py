"""Matrix products under Pallas' interpreter: what products.py means."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def matmul_scratch(shape: tuple[int, ...]) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16)


def finish_products(in_flight: int, *arrays: Any) -> list[Any]:
    del in_flight
    # The tensor core reads shared memory as the TMA unit does, through the async proxy: what a
    # finished product has read may be overwritten by a TMA copy without a fence. The
    # interpreter read it like a load, and has to be told.
    plgpu.commit_smem()
    return list(arrays)


def product(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """bfloat16 products summed in float32, as the tensor core does."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)  # exact, and faster on a CPU
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST)
