"""Whether a kernel's scratch and registers fit on an SM, before a launch finds out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

SMEM_LIMIT = 227 * 1024
_ALIGNMENT = 1024
_REGISTERS_PER_THREAD = 504  # 64 Ki registers over three warpgroups, 128 threads each
_BARRIERS = (plgpu.Barrier, plgpu.ClusterBarrier)


def smem_bytes(scratch: Any) -> int:
    """Shared memory that a pytree of scratch types takes, as Mosaic lays it out.

    Arrays start at multiples of 1024 bytes; barriers, 8 bytes each, stand together.
    """
    leaves = jax.tree.leaves(scratch, is_leaf=lambda x: hasattr(x, "shape") or _is_barrier(x))
    arrays = sum(_aligned(_array_bytes(leaf)) for leaf in leaves if not _is_barrier(leaf))
    barriers = sum(
        8 * math.prod(_extents(leaf.num_barriers)) for leaf in leaves if _is_barrier(leaf)
    )
    return arrays + barriers


def check_smem(scratch: Any, reserved: int = 0) -> None:
    """Raises if the scratch and `reserved` bytes don't fit into the shared memory of an SM."""
    needed = smem_bytes(scratch) + reserved
    if needed > SMEM_LIMIT:
        raise ValueError(f"the kernel needs {needed} bytes of shared memory of {SMEM_LIMIT}")


def check_registers(consumer: int, producer: int) -> None:
    """Raises if two consumers and a producer need more registers than there are."""
    registers = 2 * consumer + producer
    if registers > _REGISTERS_PER_THREAD:
        raise ValueError(
            "consumer_registers twice and producer_registers must not exceed "
            f"{_REGISTERS_PER_THREAD} together; got {registers}"
        )


def _is_barrier(leaf: Any) -> bool:
    return isinstance(leaf, _BARRIERS)


def _array_bytes(leaf: Any) -> int:
    return math.prod(_extents(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def _extents(shape: Iterable[Any]) -> list[int]:
    return [int(extent) for extent in shape]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
