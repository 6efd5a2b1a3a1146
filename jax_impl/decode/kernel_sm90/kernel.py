"""The kernel from its memory to its body: what the three warpgroups of a thread block share.

    even consumer   scores even blocks, owns the left half of the output   (consumers.py)
    odd consumer    scores odd blocks, owns the right half                 (consumers.py)
    producer        fills the two slots of keys                            (producer.py)

The body and everything it calls are the same on a GPU and under Pallas' interpreter. What only
hardware can do is behind `seams`, a module with one body for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.decode.kernel_sm90 import work
from jax_impl.decode.kernel_sm90.config import Config
from jax_impl.decode.kernel_sm90.problem import (
    CHUNK_COLUMNS,
    CHUNKS,
    CLUSTER_AXIS,
    ROPE_COLUMNS,
    D,
    Problem,
    chunks_of,
)
from jax_impl.mosaic.blocks import (
    BLOCK_KEYS,
    EVEN,
    LEFT,
    ODD,
    RIGHT,
    SIDE_COLUMNS,
    SLOTS,
    TILE_ROWS,
)
from jax_impl.mosaic.layouts import Ref
from jax_impl.mosaic.rows import BOX_WORDS

I32 = jnp.int32
WORKER_AXIS = "worker"
ROLE_AXIS = "role"


class Gmem(NamedTuple):
    """The operands and results in global memory. R rows of heads, token-major."""

    q: Ref  # [R, 576] bfloat16
    kv: Ref  # [pages, P, 576] bfloat16 or float8_e4m3fn
    block_table: Ref  # [B, max_pages] int32
    items: Ref  # [.., cluster, 8] int32, see work.py
    first_item: Ref  # [workers + 2] int32; behind the workers' items those without keys
    row_keys: Ref  # [T] int32
    scales: Ref  # [2] float32: from q.k to base-2 logits, and of the output
    out: Ref  # [R, 512] bfloat16 or float32
    lse: Ref  # [R] float32
    partial_out: Ref  # [.., 64, 512] float32
    partial_lse: Ref  # [.., 64] float32


class Smem(NamedTuple):
    """Shared memory of one thread block."""

    q: tuple[Ref, Ref]  # [64, 256] and [64, 320] bfloat16: two copies, each contiguous
    chunks: tuple[Ref, ...]  # 4 of [slot, key, 128] bfloat16
    rope: Ref  # [slot, key, 64] bfloat16: rotary columns, and then the block's weights
    mailbox: Ref  # [MAILBOXES, 256] float32: two words per thread
    row_keys: Ref  # [parity, 256] int32: each consumer's own
    q_ready: Ref
    kv_ready: tuple[Ref, ...]  # 5 of [slot]
    kv_free: tuple[Ref, ...]  # 4 of [slot]
    handover: Ref  # see weights_ready, totals_ready

    @property
    def keys(self) -> tuple[Ref, ...]:
        """All columns of the slots, chunk by chunk."""
        return (*self.chunks, self.rope)


# Mailboxes. Both consumers assign rows to threads alike, so a box is private to a thread of
# either.
REFERENCE = (0, 1)  # of the weights that the even (odd) consumer has just made
TOTAL = (2, 3)
MAILBOXES = 4

# Barriers, each called after what it announces. Of Pallas, since TMA copies complete them (Smem):
#   q_ready             the queries of an item are in shared memory
#   kv_ready[c][slot]   chunk c of a slot is filled; chunk ROPE_CHUNK is the rotary columns
#   kv_free[c][slot]    the consumer that owns the output columns of chunk c has read its values,
#                       in every thread block that the copies go to
# By hand, in Smem.handover, waited for by phase number:
weights_ready = (0, 1)
"""[parity]: the even (odd) block's weights and their reference maximum are in shared memory."""
totals_ready = (2, 3)
"""[parity]: the even (odd) consumer's sums of a whole item are in shared memory."""
HANDOVER_ARRIVALS = (1, 1, 1, 1)  # of each thread of a warpgroup, per phase

# The rotary columns of a slot and the mailboxes have no barrier of their own: whoever frees a slot
# has read them, or has waited for weights that were made from them.
ROPE_CHUNK = CHUNKS
# The chunk whose giving back stands for the rotary columns as well: a block's weights take
# their place, and the other consumer reads those, its last chunk's product last.
ROPE_FREED_WITH = {EVEN: chunks_of(RIGHT)[-1], ODD: chunks_of(LEFT)[-1]}


def scratch_types(problem: Problem, seams: Any) -> Smem:
    matrix = seams.matmul_scratch
    slots = len(SLOTS)
    # A part is announced by each of its TMA copies, or by whoever has widened it.
    arrivals = seams.widened_arrivals(problem) if problem.widened else problem.pages_per_block
    ready = plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals)
    free: Any = plgpu.Barrier(num_barriers=slots)
    if problem.multicast:
        free = plgpu.ClusterBarrier(collective_axes=(CLUSTER_AXIS,), num_barriers=slots)
    return Smem(
        q=(matrix((TILE_ROWS, SIDE_COLUMNS)), matrix((TILE_ROWS, D - SIDE_COLUMNS))),
        chunks=tuple(matrix((slots, BLOCK_KEYS, CHUNK_COLUMNS)) for _ in range(CHUNKS)),
        rope=matrix((slots, BLOCK_KEYS, ROPE_COLUMNS)),
        mailbox=plgpu.SMEM((MAILBOXES, BOX_WORDS), jnp.float32),
        row_keys=plgpu.SMEM((slots, BOX_WORDS), jnp.int32),
        q_ready=plgpu.Barrier(num_arrivals=2),
        kv_ready=(ready,) * (ROPE_CHUNK + 1),
        kv_free=(free,) * CHUNKS,
        handover=seams.barrier_scratch(HANDOVER_ARRIVALS),
    )


class Item(NamedTuple):
    """One tile of rows over a run of key pairs."""

    first_row: Any
    num_rows: Any
    request: Any
    first_pair: Any
    num_pairs: Any
    end: Any  # keys that are looked at
    full: Any  # keys that every row sees
    partial: Any  # place of an unfinished result, or -1


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything that the roles of one thread block share."""

    problem: Problem
    config: Config
    seams: ModuleType
    gmem: Gmem
    smem: Smem
    worker: Any  # number of this thread block, or of its cluster
    tile: Any  # which of its cluster this thread block is

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's and of the producer's thread."""
        return self.config.registers_for(widened=self.problem.widened)

    @property
    def first(self) -> Any:
        return self.gmem.first_item[self.worker]

    @property
    def last(self) -> Any:
        return self.gmem.first_item[self.worker + 1]

    def item(self, number: Any) -> Item:
        """An item of this thread block. Keys that the block table has no room for don't count."""
        fields = (self.gmem.items[number, self.tile, field] for field in range(work.ITEM_FIELDS))
        item = Item(*fields)
        most = I32(self.problem.most_keys)
        return item._replace(
            request=jnp.clip(item.request, 0, self.problem.num_requests - 1),
            end=jnp.minimum(item.end, most),
            full=jnp.minimum(item.full, most),
        )


class Roles(NamedTuple):
    """What each warpgroup does, in their order."""

    even_consumer: Callable[[Context], None]
    odd_consumer: Callable[[Context], None]
    producer: Callable[[Context], None]


def decode_body(
    problem: Problem, config: Config, seams: ModuleType, roles: Roles, gmem: Gmem, smem: Smem
) -> None:
    """All items of one thread block."""
    tile = lax.axis_index(CLUSTER_AXIS) if problem.cluster > 1 else I32(0)
    context = Context(problem, config, seams, gmem, smem, lax.axis_index(WORKER_AXIS), tile)
    seams.initialise_barriers(smem.handover, HANDOVER_ARRIVALS)
    for number, role in enumerate(roles):

        @pl.when(lax.axis_index(ROLE_AXIS) == number)
        def _play(role=role) -> None:
            role(context)
