"""What every part of the kernel's body is handed: its extents, its memory, its seams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_impl.prefill.sparse.kernel_sm90.config import Config
from jax_impl.prefill.sparse.kernel_sm90.problem import PAIR_KEYS, TILE_HEADS, Problem

I32 = jnp.int32


class Gmem(NamedTuple):
    """The operands and results in global memory.

    A launch serves t tokens of a batch of T, those from first_token on.
    """

    q: Any  # [T, H, D] bfloat16
    kv: Any  # [S, D] bfloat16, or a tuple of paged caches [num_pages, page_stride] uint8
    indices: Any  # [t, K] int32
    length: Any  # [t] int32
    sink: Any  # [H] float32, base-e logits
    scale: Any  # [1] float32, the factor from q.k to base-2 logits
    first_token: Any  # [1] int32
    out: Any  # [T, H, 512] bfloat16
    max_logits: Any  # [T, H] float32
    lse: Any  # [T, H] float32


class Smem(NamedTuple):
    """Shared memory of one thread block."""

    q: tuple[Any, Any]  # [64, 256] and [64, D - 256] bfloat16: two copies, each contiguous
    kv: Any  # [slot, key, D] bfloat16
    mask: Any  # [slot, key] float32: 0 for a key, -inf for a hole
    mailbox: Any  # [MAILBOXES, 256] float32: two words per thread
    q_ready: Any  # barriers of the two parts of q
    barriers: Any  # see barriers.py
    weights: tuple[Any, ...]  # [parity, 64, 64] bfloat16, or nothing if kept in the rope columns


# Mailboxes. Both consumers assign rows to threads alike, so a box is private to a thread of
# either.
REFERENCE = (0, 1)  # of the weights that the even (odd) consumer has just made
TOTAL = (2, 3)
MAXIMUM = 4
MAILBOXES = 5


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
