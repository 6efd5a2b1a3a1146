"""What every part of the kernel's body is handed: its extents, its memory, its seams."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_impl.decode.kernel_sm90 import work
from jax_impl.decode.kernel_sm90.config import Config
from jax_impl.decode.kernel_sm90.problem import Problem

I32 = jnp.int32


class Gmem(NamedTuple):
    """The operands and results in global memory. R rows of heads, token-major."""

    q: Any  # [R, 576] bfloat16
    kv: Any  # [pages, P, 576] bfloat16 or float8_e4m3fn
    block_table: Any  # [B, max_pages] int32
    items: Any  # [.., cluster, 8] int32, see work.py
    first_item: Any  # [workers + 2] int32; behind the workers' items those without keys
    row_keys: Any  # [T] int32
    scales: Any  # [2] float32: from q.k to base-2 logits, and of the output
    out: Any  # [R, 512] bfloat16 or float32
    lse: Any  # [R] float32
    partial_out: Any  # [.., 64, 512] float32
    partial_lse: Any  # [.., 64] float32


class Smem(NamedTuple):
    """Shared memory of one thread block."""

    q: tuple[Any, Any]  # [64, 256] and [64, 320] bfloat16: two copies, each contiguous
    chunks: tuple[Any, ...]  # 4 of [slot, key, 128] bfloat16
    rope: Any  # [slot, key, 64] bfloat16: rotary columns, and then the block's weights
    mailbox: Any  # [MAILBOXES, 256] float32: two words per thread
    row_keys: Any  # [parity, 256] int32: each consumer's own
    q_ready: Any
    kv_ready: tuple[Any, ...]  # 5 of [slot]
    kv_free: tuple[Any, ...]  # 4 of [slot]
    handover: Any  # see barriers.py

    @property
    def keys(self) -> tuple[Any, ...]:
        """All columns of the slots, chunk by chunk."""
        return (*self.chunks, self.rope)


# Mailboxes. Both consumers assign rows to threads alike, so a box is private to a thread of
# either.
REFERENCE = (0, 1)  # of the weights that the even (odd) consumer has just made
TOTAL = (2, 3)
MAILBOXES = 4


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
