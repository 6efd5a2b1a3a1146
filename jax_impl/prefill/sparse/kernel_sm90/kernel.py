"""The kernel from its memory to its body: what the three warpgroups of a thread block share.

    even consumer   scores even blocks, owns the left half of the output   (consumers.py)
    odd consumer    scores odd blocks, owns the right half                 (consumers.py)
    producer        fills the two slots of keys           (producer.py, or paged_producer.py)

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

from jax_impl.mosaic.blocks import BLOCK_KEYS, LEFT, PAIR_KEYS, SIDE_COLUMNS, SIDES, SLOTS
from jax_impl.mosaic.layouts import Ref
from jax_impl.mosaic.rows import BOX_WORDS
from jax_impl.prefill.sparse.kernel_sm90.config import Config
from jax_impl.prefill.sparse.kernel_sm90.problem import TILE_HEADS, Problem

I32 = jnp.int32
CTA_AXIS = "cta"
ROLE_AXIS = "role"


class Gmem(NamedTuple):
    """The operands and results in global memory.

    A launch serves t tokens of a batch of T, those from first_token on.
    """

    q: Ref  # [T, H, D] bfloat16
    kv: Ref  # [S, D] bfloat16, or a tuple of paged caches [num_pages, page_stride] uint8
    indices: Ref  # [t, K] int32
    length: Ref  # [t] int32
    sink: Ref  # [H] float32, base-e logits
    scale: Ref  # [1] float32, the factor from q.k to base-2 logits
    first_token: Ref  # [1] int32
    out: Ref  # [T, H, 512] bfloat16
    max_logits: Ref  # [T, H] float32
    lse: Ref  # [T, H] float32


class Smem(NamedTuple):
    """Shared memory of one thread block."""

    q: tuple[Ref, Ref]  # [64, 256] and [64, D - 256] bfloat16: two copies, each contiguous
    kv: Ref  # [slot, key, D] bfloat16
    mask: Ref  # [slot, key] float32: 0 for a key, -inf for a hole
    mailbox: Ref  # [MAILBOXES, 256] float32: two words per thread
    q_ready: Ref  # barriers of the two parts of q
    barriers: Ref  # see arrivals_per_thread
    weights: tuple[Ref, ...]  # [parity, 64, 64] bfloat16, or nothing if kept in the rope columns


# Mailboxes. Both consumers assign rows to threads alike, so a box is private to a thread of
# either.
REFERENCE = (0, 1)  # of the weights that the even (odd) consumer has just made
TOTAL = (2, 3)
MAXIMUM = 4
MAILBOXES = 5

# Barriers in shared memory, each called after what it announces.
kv_ready = ((0, 1), (2, 3))
"""[slot][side]: the producer has filled these columns of a slot; the left one also announces the
slot's mask."""
kv_free = ((4, 5), (6, 7))
"""[slot][side]: the consumer of this side has read its values out of the slot."""
weights_ready = (8, 9)
"""[parity]: the even (odd) block's weights and their reference maximum are in shared memory."""
totals_ready = (10, 11)
"""[parity]: the even (odd) consumer's sums of a whole tile are in shared memory."""

assert sorted(sum((*kv_ready, *kv_free, weights_ready, totals_ready), ())) == list(range(12))

# The score columns of a slot, the mask and the mailboxes have no barrier of their own: whoever
# frees a slot has read them, or has waited for weights that were made from them.


def arrivals_per_thread(problem: Problem) -> tuple[int, ...]:
    """How many times each of the 128 threads of a warpgroup arrives per phase, by barrier.

    A left column group is announced twice: once with its mask, and once when its columns are
    there. With pages so is a right one: once with what has been widened, and once when the rest
    has been copied.
    """
    announced_twice = SIDES if problem.pages else (LEFT,)
    twice = {kv_ready[slot][side] for slot in SLOTS for side in announced_twice}
    return tuple(2 if barrier in twice else 1 for barrier in range(totals_ready[-1] + 1))


def scratch_types(problem: Problem, seams: Any) -> Smem:
    matrix = seams.matmul_scratch
    widths = (SIDE_COLUMNS, problem.d_qk - SIDE_COLUMNS)
    weights = () if problem.weights_in_rope else (matrix((2, TILE_HEADS, BLOCK_KEYS)),)
    return Smem(
        q=tuple(matrix((TILE_HEADS, width)) for width in widths),
        kv=matrix((2, BLOCK_KEYS, problem.d_qk)),
        mask=plgpu.SMEM((2, BLOCK_KEYS), jnp.float32),
        mailbox=plgpu.SMEM((MAILBOXES, BOX_WORDS), jnp.float32),
        q_ready=plgpu.Barrier(num_barriers=len(SIDES)),
        barriers=seams.barrier_scratch(arrivals_per_thread(problem)),
        weights=weights,
    )


class Tile(NamedTuple):
    """64 heads of one token."""

    number: Any
    token: Any  # of this launch
    batch_token: Any  # its row of q and of the results
    first_head: Any


class OwnTile(NamedTuple):
    """A tile on a thread block's way, and what is known of it when it begins."""

    tile: Tile
    i: Any  # how many tiles this thread block has finished before
    length: Any  # slots of the token that may hold keys, in [0, K]
    num_pairs: Any  # of blocks to walk over
    following: Tile  # the tile after it; behind the last one, any
    has_following: Any
    following_stated_length: Any  # not yet held to [0, K]


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything that the roles of one thread block share."""

    problem: Problem
    config: Config
    seams: ModuleType
    gmem: Gmem
    smem: Smem
    cta: Any
    first_token: Any

    @property
    def num_ctas(self) -> int:
        return self.config.ctas_for(self.problem)

    def num_own_tiles(self) -> Any:
        """Tiles of this thread block: its own number, and every num_ctas-th after it."""
        return lax.div(self.problem.num_tiles - self.cta + self.num_ctas - 1, I32(self.num_ctas))

    def tile(self, number: Any) -> Tile:
        """Tiles of a token follow one another, so that they run at the same time."""
        head_tiles = I32(self.problem.head_tiles)
        token = lax.div(number, head_tiles)
        return Tile(
            number=number,
            token=token,
            batch_token=self.first_token + token,
            first_head=lax.rem(number, head_tiles) * TILE_HEADS,
        )

    def prefetch_queries(self, tile: Tile) -> None:
        number = tile.number + self.first_token * self.problem.head_tiles
        self.seams.prefetch_queries(self.gmem.q, number)

    def own_tile(self, i: Any) -> Tile:
        return self.tile(self.cta + i * self.num_ctas)

    def for_own_tiles(self, visit: Callable[[OwnTile, Any], Any], carry: Any) -> Any:
        """carry = visit(tile, carry) for all tiles of this thread block, in their order.

        The length is loaded a tile ahead and looked at only when its tile begins: everybody's
        first step depends on it, and a load from global memory takes longer than the end of a
        tile.
        """
        count = self.num_own_tiles()

        def step(i: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            stated_length, carry = state
            tile = self.own_tile(i)
            # Behind the last tile there is none to look ahead to; any will do.
            following = self.tile(jnp.minimum(tile.number + self.num_ctas, self._last_tile))
            stated_next = self.gmem.length[following.token]
            length = self.held_to_list(stated_length)
            own = OwnTile(
                tile, i, length, self.num_pairs(length), following, i + 1 < count, stated_next
            )
            return stated_next, visit(own, carry)

        first_length = self.gmem.length[self.own_tile(I32(0)).token]
        return lax.fori_loop(0, count, step, (first_length, carry))[1]

    def held_to_list(self, stated_length: Any) -> Any:
        """More slots than its row has can't be read, and fewer than none can't be walked."""
        return jnp.clip(stated_length, 0, self.problem.topk)

    @property
    def _last_tile(self) -> int:
        return self.problem.num_tiles - 1

    def num_pairs(self, length: Any) -> Any:
        """Pairs of blocks to walk over: at least one, so that every tile has an epilogue."""
        return jnp.maximum(lax.div(length + (PAIR_KEYS - 1), I32(PAIR_KEYS)), 1)


class Roles(NamedTuple):
    """What each warpgroup does, in their order."""

    even_consumer: Callable[[Context], None]
    odd_consumer: Callable[[Context], None]
    producer: Callable[[Context], None]


def sparse_prefill_body(
    problem: Problem, config: Config, seams: ModuleType, roles: Roles, gmem: Gmem, smem: Smem
) -> None:
    """All tiles of one thread block."""
    context = Context(
        problem, config, seams, gmem, smem,
        cta=lax.axis_index(CTA_AXIS), first_token=gmem.first_token[0],
    )  # fmt: skip
    seams.initialise_barriers(smem.barriers, arrivals_per_thread(problem))
    for number, role in enumerate(roles):

        @pl.when(lax.axis_index(ROLE_AXIS) == number)
        def _play(role=role) -> None:
            role(context)
