"""Batches for the tests: global keys, laid out as each rank of a DCP group would hold them.

Whatever lies outside every length is poisoned: cache rows behind a request's last key are NaN,
and block-table entries behind its last page name a page of NaN or none at all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_impl import DecodePlan, DecodeResult, dcp_decode, merge_states, plan_decode
from jax_impl.planning import cache_slots, local_seq_lens

CPU_BACKENDS = ("xla", "pallas-interpret")
D = 576
STALE = (10**6, -5, 0)  # page 0 holds nothing but NaN


def bf16(array: Any) -> np.ndarray:
    return np.asarray(array, jnp.bfloat16)


@dataclasses.dataclass(kw_only=True)
class Batch:
    total_lens: list[int]
    query_lens: list[int]
    heads: int = 6
    page_size: int = 32
    world: int = 1
    interleave: int = 1
    causal: bool = True
    padding: int = 0
    dtype: Any = jnp.bfloat16
    sm_scale: float = 0.05
    seed: int = 0
    plan_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.q = bf16(rng.standard_normal((self.tokens + self.padding, self.heads, D)))
        self.keys = [
            np.asarray(bf16(rng.standard_normal((length, D))), self.dtype)
            for length in self.total_lens
        ]

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.cumsum([0, *self.query_lens])

    @property
    def pages(self) -> int:
        """Width of the block table: two columns more than the longest request needs, or so.

        Few distinct widths: every new one is compiled anew.
        """
        run = self.page_size * self.world
        return max(12, -(-max(self.total_lens, default=0) // run) + 2)

    def plan(self, rank: int = 0, **changes: Any) -> DecodePlan:
        group = {"dcp_rank": rank, "dcp_world": self.world, "interleave": self.interleave}
        options = {
            "max_query_len": max([1, *self.query_lens]),
            "heads": self.heads,
            "causal": self.causal,
            **group,
            **self.plan_options,
        }
        held = local_seq_lens(self.total_lens, **group)
        return plan_decode(self.query_start_loc, held, self.total_lens, **(options | changes))

    def cache(self, rank: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """kv_cache and block_table of a rank."""
        rng = np.random.default_rng(self.seed + 1)
        requests, size = len(self.total_lens), self.page_size
        table = 1 + rng.permutation(requests * self.pages).reshape(requests, self.pages)
        cache = np.full(((1 + requests * self.pages) * size, D), np.nan).astype(self.dtype)
        group = {"dcp_rank": rank, "dcp_world": self.world, "interleave": self.interleave}
        for row, keys in zip(table, self.keys, strict=True):
            slots = cache_slots(np.arange(len(keys)), row, page_size=size, **group)
            cache[slots[slots >= 0]] = keys[slots >= 0]
            used = -(-int((slots >= 0).sum()) // size)
            row[used:] = np.resize(STALE, self.pages - used)
        return cache.reshape(-1, size, D), table.astype(np.int32)

    def run_rank(self, backend: str, rank: int = 0, **arguments: Any) -> DecodeResult:
        plan = arguments.pop("plan", None) or self.plan(rank)
        result = dcp_decode(
            arguments.pop("q", self.q), *self.cache(rank), plan, self.sm_scale,
            backend=backend, **arguments,
        )  # fmt: skip
        return DecodeResult(*(np.asarray(array) for array in result))

    def run(self, backend: str, **arguments: Any) -> DecodeResult:
        """All ranks, merged."""
        results = [self.run_rank(backend, rank, **arguments) for rank in range(self.world)]
        return merge_states([r.out for r in results], [r.lse for r in results])


def constant_batch(values: list[Any], query_lens: list[int] | None = None, **options: Any) -> Batch:
    """Zero queries, and keys whose columns all equal a value: out is their mean, lse ln(count)."""
    lens = [len(v) for v in values]
    query_lens = query_lens or [1] * len(lens)
    batch = Batch(total_lens=lens, query_lens=query_lens, heads=2, **options)
    batch.q[:] = 0
    batch.keys = [
        np.repeat(np.asarray(v, np.float64)[:, None], D, axis=1).astype(batch.dtype) for v in values
    ]
    return batch


def numbers(result: DecodeResult) -> list[float]:
    """The output of a batch of constants: one number per token."""
    out = np.asarray(result.out, np.float32)
    np.testing.assert_array_equal(out, np.broadcast_to(out[:, :1, :1], out.shape))
    return out[:, 0, 0].tolist()


def assert_same_bits(left: DecodeResult, right: DecodeResult) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(
            np.asarray(a, np.float32).view(np.uint32), np.asarray(b, np.float32).view(np.uint32)
        )
