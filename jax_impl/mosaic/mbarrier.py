"""Barriers in shared memory, by hand.

Pallas' barriers can't be handed to inline code, and can't count the completion of the cp.async
copies of a gather. These live in an int32 buffer, two words each, and are waited for by phase
number: phase n of a barrier is complete once it has been completed n + 1 times. The hardware
keeps the phase's parity only, so a thread may be at most one phase behind; asking for phase -1
returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jax_impl.mosaic import ptx

BYTES = 8
WORDS = BYTES // 4
_SHARED_MEMORY = 3
_SUSPEND_HINT_NS = 10_000_000


def initialise(base: ir.Value, arrivals: Sequence[int]) -> None:
    """Thread 0 sets up one barrier per count; all threads of the block must call this."""
    first = ptx.equals(mgpu_utils.thread_idx(), 0)
    with ptx.only_if(first):
        for number, count in enumerate(arrivals):
            ptx.asm(
                "mbarrier.init.shared::cta.b64 [$0], $1;",
                [ptx.plus(base, BYTES * number), ptx.constant(count)],
                "r,r",
            )
        ptx.asm("fence.mbarrier_init.release.cluster;")
    ptx.asm("bar.sync 0;")


def wait(base: ir.Value, number: int, phase: ir.Value) -> None:
    pointer = llvm.inttoptr(llvm.PointerType.get(_SHARED_MEMORY), ptx.plus(base, BYTES * number))
    parity = arith.andi(phase, ptx.constant(1))
    nvvm.mbarrier_try_wait_parity(pointer, parity, ptx.constant(_SUSPEND_HINT_NS))


def arrive(base: ir.Value, number: int) -> None:
    ptx.asm("mbarrier.arrive.shared::cta.b64 _, [$0];", [ptx.plus(base, BYTES * number)], "r")


def arrive_after_copies(base: ir.Value, number: int) -> None:
    """Arrives for this thread once all the cp.async copies that it has issued are complete.

    `noinc`: the arrival is one of those that the barrier was set up for.
    """
    ptx.asm(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];",
        [ptx.plus(base, BYTES * number)],
        "r",
    )


def fence_generic_to_async() -> None:
    """Makes what threads wrote to (or copied into) shared memory visible to the tensor core."""
    ptx.asm("fence.proxy.async.shared::cta;")
