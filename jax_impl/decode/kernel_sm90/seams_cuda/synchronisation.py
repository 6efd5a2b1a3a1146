"""Barriers between the two consumers, and the fence between the proxies of shared memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.decode.kernel_sm90 import barriers
from jax_impl.mosaic import mbarrier, ptx
from jax_impl.mosaic.layouts import SCALAR
from jax_impl.mosaic.ptx import REF


def barrier_scratch() -> Any:
    return plgpu.SMEM((mbarrier.WORDS * barriers.COUNT,), jnp.int32)


def initialise_barriers(barriers_smem: Any) -> None:
    @ptx.inline(REF)
    def lower(_, base):
        mbarrier.initialise(ptx.smem_address(base), [ptx.WARPGROUP] * barriers.COUNT)

    lower(barriers_smem)


def wait(barriers_smem: Any, barrier: int, phase: Any) -> None:
    """Waits for the end of a phase, counted from 0."""

    @ptx.inline(REF, SCALAR)
    def lower(_, base, phase):
        mbarrier.wait(ptx.smem_address(base), barrier, ptx.scalar(phase))

    lower(barriers_smem, phase)


def arrive(barriers_smem: Any, barrier: int, *, before_products: bool = False) -> None:
    """before_products: a matrix product of another warpgroup is to read what was stored."""

    @ptx.inline(REF)
    def lower(_, base):
        if before_products:
            mbarrier.fence_generic_to_async()
        mbarrier.arrive(ptx.smem_address(base), barrier)

    lower(barriers_smem)
