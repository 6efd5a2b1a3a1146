"""The kernel's body: one thread block, three warpgroups, one role each.

The body and everything it calls are the same on a GPU and under Pallas' interpreter. What only
hardware can do is behind `seams`, a module with one body for each.
"""

from __future__ import annotations

from types import ModuleType

from jax import lax
from jax.experimental import pallas as pl

from jax_impl.decode.kernel_sm90 import consumers, producer
from jax_impl.decode.kernel_sm90.config import Config
from jax_impl.decode.kernel_sm90.context import I32, Context, Gmem, Smem
from jax_impl.decode.kernel_sm90.problem import CLUSTER_AXIS, Problem

WORKER_AXIS = "worker"
ROLE_AXIS = "role"
NUM_ROLES = 3


def decode_body(
    problem: Problem, config: Config, seams: ModuleType, gmem: Gmem, smem: Smem
) -> None:
    """All items of one thread block."""
    tile = lax.axis_index(CLUSTER_AXIS) if problem.cluster > 1 else I32(0)
    context = Context(problem, config, seams, gmem, smem, lax.axis_index(WORKER_AXIS), tile)
    seams.initialise_barriers(smem.handover)
    roles = (consumers.even_consumer, consumers.odd_consumer, producer.produce)
    assert len(roles) == NUM_ROLES
    for number, role in enumerate(roles):

        @pl.when(lax.axis_index(ROLE_AXIS) == number)
        def _play(role=role) -> None:
            role(context)
