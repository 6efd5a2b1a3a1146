"""Seams of barriers under Pallas' interpreter: what synchronisation.py means.

A warpgroup is one thread here, so it arrives once where the hardware counts 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic.layouts import Ref


def barrier_scratch(arrivals: Sequence[int]) -> Any:
    return [plgpu.Barrier(num_arrivals=count) for count in arrivals]


def initialise_barriers(barriers_smem: Ref, arrivals: Sequence[int]) -> None:
    del barriers_smem, arrivals  # Pallas has done it


def wait(barriers_smem: Ref, barrier: int, phase: Any, *, before_products: bool = False) -> None:
    @pl.when(phase >= 0)
    def _wait() -> None:
        plgpu.barrier_wait(barriers_smem[barrier])

    if before_products:
        plgpu.commit_smem()


def arrive(barriers_smem: Ref, barrier: int, *, before_products: bool = False) -> None:
    if before_products:
        plgpu.commit_smem()
    plgpu.barrier_arrive(barriers_smem[barrier])


def arrive_after_copies(barriers_smem: Ref, barrier: int) -> None:
    plgpu.barrier_arrive(barriers_smem[barrier])  # copies are done when they return
