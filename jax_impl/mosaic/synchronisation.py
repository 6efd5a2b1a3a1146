"""Seams of barriers between warpgroups, and of the fences between the proxies of shared memory.

Each function has a namesake in synchronisation_interpret.py. Docstrings stand here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic import mbarrier, ptx
from jax_impl.mosaic.layouts import SCALAR, Ref
from jax_impl.mosaic.ptx import REF


def barrier_scratch(arrivals: Sequence[int]) -> Any:
    """Of a barrier for each of the arrivals: of each thread of a warpgroup, per phase."""
    return plgpu.SMEM((mbarrier.WORDS * len(arrivals),), jnp.int32)


def initialise_barriers(barriers_smem: Ref, arrivals: Sequence[int]) -> None:
    @ptx.inline(REF)
    def lower(_, base):
        counts = [ptx.WARPGROUP * count for count in arrivals]
        mbarrier.initialise(ptx.smem_address(base), counts)

    lower(barriers_smem)


def wait(barriers_smem: Ref, barrier: int, phase: Any, *, before_products: bool = False) -> None:
    """Waits for the end of a phase; phase -1 has ended before the kernel began.

    before_products: a matrix product is to read what the gather has written.
    """

    @ptx.inline(REF, SCALAR)
    def lower(_, base, phase):
        mbarrier.wait(ptx.smem_address(base), barrier, ptx.scalar(phase))
        if before_products:
            mbarrier.fence_generic_to_async()

    lower(barriers_smem, phase)


def arrive(barriers_smem: Ref, barrier: int, *, before_products: bool = False) -> None:
    """before_products: a matrix product of another warpgroup is to read what was stored."""

    @ptx.inline(REF)
    def lower(_, base):
        if before_products:
            mbarrier.fence_generic_to_async()
        mbarrier.arrive(ptx.smem_address(base), barrier)

    lower(barriers_smem)


def arrive_after_copies(barriers_smem: Ref, barrier: int) -> None:
    """Arrives once the copies that this warpgroup has started so far have landed."""

    @ptx.inline(REF)
    def lower(_, base):
        mbarrier.arrive_after_copies(ptx.smem_address(base), barrier)

    lower(barriers_smem)
