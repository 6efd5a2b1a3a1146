"""Decode batches in global positions, their shards laid out by enumeration, and attention by loops.

Nothing here uses the planning under test: a rank's keys are the list of the positions that it owns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

STALE = -7  # what a block table holds where no page is meant


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def owned(total: int, rank: int, world: int, interleave: int) -> list[int]:
    """The global positions of one rank, in the order in which it holds them."""
    return [g for g in range(total) if g // interleave % world == rank]


@dataclass(frozen=True, eq=False)
class Problem:
    """q [T, H, 576] with rows of padding at its end, keys [T_b, 576] of each request."""

    q: Tensor
    keys: list[Tensor]
    query_lens: list[int]
    sm_scale: float = 576**-0.5
    causal: bool = True

    @property
    def totals(self) -> list[int]:
        return [len(keys) for keys in self.keys]

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    def shard(
        self, rank: int = 0, world: int = 1, interleave: int = 1, page: int = 64
    ) -> dict[str, Any]:
        """One rank's arguments: shuffled pages, NaN in every slot past a length, stale entries."""
        local = [owned(total, rank, world, interleave) for total in self.totals]
        pages = [-(-len(places) // page) for places in local]
        dtype = self.keys[0].dtype if self.keys else torch.bfloat16
        cache = torch.full((sum(pages) + 1, page, 576), math.nan).to(dtype)
        table = torch.full((len(self.keys), max(pages, default=0) + 1), STALE, dtype=torch.int32)
        free = torch.randperm(len(cache), generator=torch.Generator().manual_seed(7)).tolist()
        for b, places in enumerate(local):
            for j in range(pages[b]):
                table[b, j] = free.pop()
            for k, g in enumerate(places):
                cache[table[b, k // page], k % page] = self.keys[b][g]
        return {
            "q": self.q,
            "kv_cache": cache,
            "block_table": table,
            "seq_lens": int32([len(places) for places in local]),
            "query_start_loc": int32([0, *accumulate(self.query_lens)]),
            "sm_scale": self.sm_scale,
            "total_lens": int32(self.totals),
            "dcp_rank": rank,
            "dcp_world": world,
            "interleave": interleave,
            "causal": self.causal,
        }

    def by_loops(self, rank: int = 0, world: int = 1, interleave: int = 1) -> tuple[Tensor, Tensor]:
        """out [T, H, 512] and lse [T, H] of one rank in float64, row by row and head by head."""
        T, H, _ = self.q.shape
        out = torch.zeros(T, H, 512, dtype=torch.float64)
        lse = torch.full((T, H), -math.inf, dtype=torch.float64)
        t = 0
        for b, count in enumerate(self.query_lens):
            for j in range(count):
                bound = self.totals[b] - (count - 1 - j) if self.causal else self.totals[b]
                seen = [g for g in owned(self.totals[b], rank, world, interleave) if g < bound]
                for h in range(H) if seen else ():
                    keys = self.keys[b][seen].double()
                    z = keys @ self.q[t, h].double() * self.sm_scale
                    lse[t, h] = torch.logsumexp(z, 0)
                    out[t, h] = torch.softmax(z, 0) @ keys[:, :512]
                t += 1
        return out, lse


def random_problem(
    totals: list[int],
    query_lens: list[int],
    *,
    heads: int = 2,
    padding: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
) -> Problem:
    """N(0, 1) queries and keys."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(query_lens) + padding, heads, 576, generator=g)
    keys = [torch.randn(total, 576, generator=g).to(dtype) for total in totals]
    return Problem(q.bfloat16(), keys, query_lens, causal=causal)


def zero_query(values: list[list[float]], query_lens: list[int], *, heads: int = 1) -> Problem:
    """q = 0: every visible key has logit 0, out is the mean of their values and lse ln(count)."""
    keys = [torch.tensor(v)[:, None].expand(len(v), 576).bfloat16() for v in values]
    q = torch.zeros(sum(query_lens), heads, 576, dtype=torch.bfloat16)
    return Problem(q, keys, query_lens, sm_scale=1.0)
