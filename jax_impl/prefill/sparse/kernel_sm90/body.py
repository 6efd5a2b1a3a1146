"""The kernel's body: one thread block, three warpgroups, one role each.

The body and everything it calls are the same on a GPU and under Pallas' interpreter. What only
hardware can do is behind `seams`, a module with one body for each.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from jax import lax
from jax.experimental import pallas as pl

from jax_impl.prefill.sparse.kernel_sm90 import barriers, consumers, paged_producer, producer
from jax_impl.prefill.sparse.kernel_sm90.config import Config
from jax_impl.prefill.sparse.kernel_sm90.context import Context, Gmem, Smem
from jax_impl.prefill.sparse.kernel_sm90.problem import Problem

CTA_AXIS = "cta"
ROLE_AXIS = "role"


def roles_of(problem: Problem) -> tuple[Callable[[Context], None], ...]:
    """What each warpgroup does."""
    produce = paged_producer.produce if problem.pages else producer.produce
    return (consumers.even_consumer, consumers.odd_consumer, produce)


def sparse_prefill_body(
    problem: Problem, config: Config, seams: ModuleType, gmem: Gmem, smem: Smem
) -> None:
    """All tiles of one thread block."""
    context = Context(
        problem, config, seams, gmem, smem,
        cta=lax.axis_index(CTA_AXIS), first_token=gmem.first_token[0],
    )  # fmt: skip
    arrivals = barriers.arrivals_per_thread(paged=bool(problem.pages))
    seams.initialise_barriers(smem.barriers, arrivals)
    for number, role in enumerate(roles_of(problem)):

        @pl.when(lax.axis_index(ROLE_AXIS) == number)
        def _play(role=role) -> None:
            role(context)
