"""Small V4 prefill batches with their keys beside them, unpaged, and the right answer by loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torch_ref.kv_cache import PagedKV, empty_cache, insert_kv, read_kv

Span = tuple[int, int]


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class V4Problem:
    """A batch, and per request the rows that its positions and compressed entries hold."""

    arguments: dict[str, Any]
    positions: list[Tensor]
    entries: list[Tensor]
    limits: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> V4Problem:
        return replace(self, arguments={**self.arguments, **changes})

    @property
    def everything(self) -> dict[str, Any]:
        """Arguments of v4_prefill; `arguments` alone are flat_v4_call's."""
        return {**self.arguments, **self.limits}

    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of each row of q."""
        starts, seq = (
            self.arguments["query_start_loc"].tolist(),
            self.arguments["seq_lens"].tolist(),
        )
        return [
            (i, seq[i] - (starts[i + 1] - t))
            for i in range(len(seq))
            for t in range(starts[i], starts[i + 1])
        ]

    def keys_of(self, t: int) -> tuple[list[int], list[int]]:
        """The entries and the positions that token t sees, one test a candidate."""
        i, position = self.tokens()[t]
        a = self.arguments
        listed: list[int] = []
        if a["topk_indices"] is not None:
            visible = [
                c
                for c in range(len(self.entries[i]))
                if (c + 1) * a["compress_ratio"] - 1 <= position
            ]
            row = a["topk_indices"][t].tolist()
            listed = row[: min(len(visible), len(row))]
            assert set(listed) <= set(visible)
        image = None
        for first, last in (a["image_spans"] or [[]] * 99)[i]:
            if first <= position <= last:
                image = (first, last)
        seen = [
            p
            for p in range(len(self.positions[i]))
            if position - a["window"] < p <= position
            or (image is not None and image[0] <= p <= image[1])
        ]
        return listed, seen

    def keys(self, t: int) -> Tensor:
        """Token t's keys in order, from the unpaged rows."""
        i, _ = self.tokens()[t]
        listed, seen = self.keys_of(t)
        return torch.cat([self.entries[i][listed], self.positions[i][seen]])


def _cache(
    kv_format: str, rows: list[Tensor], P: int, g: torch.Generator
) -> tuple[PagedKV, Tensor, list[Tensor]]:
    """Rows on pages in random order, everything else poisoned: cache, table, rows as they read."""
    pages = [-(-len(r) // P) for r in rows]
    total = sum(pages) + 2
    order = torch.randperm(total, generator=g).tolist()
    table = torch.full((len(rows), max(pages, default=0) + 1), 1 << 30, dtype=torch.int32)
    mapping = []
    for i, r in enumerate(rows):
        table[i, : pages[i]] = int32([order.pop() for _ in range(pages[i])])
        mapping += [int(table[i, p // P]) * P + p % P for p in range(len(r))]
    cache = empty_cache(kv_format, num_pages=total, page_size=P, fill=0xFF)
    values = torch.cat([*rows, torch.zeros(0, 512).bfloat16()])
    paged = insert_kv(cache, values, int32(mapping))
    kept = read_kv(paged, int32(mapping))
    return paged, table, list(kept.split([len(r) for r in rows]))


def v4_problem(
    seq: Sequence[int],
    q: Sequence[int],
    *,
    ratio: int = 4,
    window: int = 8,
    topk: int = 4,
    page: int = 4,
    compressed_page: int | None = None,
    heads: int = 2,
    kv_format: str = "v4-fp8",
    images: Sequence[Sequence[Span]] | None = None,
    max_image: int = 0,
    sink: bool = True,
    offset: int = 0,
    chunk_size: int = 2,
    max_model_len: int | None = None,
    max_num_batched_tokens: int | None = None,
    size: float = 1.0,
    seed: int = 0,
) -> V4Problem:
    """N(0, 1) queries and keys, these times size; a token lists visible entries in random order."""
    g = torch.Generator().manual_seed(seed)
    n, T = len(seq), sum(q)

    def rows(counts: Sequence[int]) -> list[Tensor]:
        return [(torch.randn(c, 512, generator=g) * size).bfloat16() for c in counts]

    swa, swa_table, positions = _cache(kv_format, rows(seq), page, g)
    arguments: dict[str, Any] = {
        "q": torch.randn(T, heads, 512, generator=g).bfloat16(),
        "swa_cache": swa.cache,
        "swa_block_table": swa_table,
        "swa_page": page,
        "kv_format": kv_format,
        "query_start_loc": int32([offset + sum(q[:i]) for i in range(n + 1)]),
        "seq_lens": int32(list(seq)),
        "sm_scale": 512**-0.5,
        "compress_ratio": ratio,
        "window": window,
        "attn_sink": torch.randn(heads, generator=g) if sink else None,
        "image_spans": images,
        "max_image_tokens": max_image,
        "topk_indices": None,
    }
    entries = [torch.zeros(0, 512).bfloat16() for _ in seq]
    if ratio > 1:
        P = compressed_page or max(256 // ratio, 1)
        compressed, table, entries = _cache(kv_format, rows([s // ratio for s in seq]), P, g)
        lists = torch.full((T, topk), -1, dtype=torch.int32)
        t = 0
        for s, count in zip(seq, q, strict=True):
            for position in range(s - count, s):
                chosen = torch.randperm((position + 1) // ratio, generator=g)[:topk]
                lists[t, : len(chosen)] = chosen.int()
                t += 1
        arguments |= {
            "compressed_cache": compressed.cache,
            "compressed_page": P,
            "compressed_block_table": table,
            "topk_indices": lists,
        }
    limits = {
        "max_model_len": max_model_len or max(seq, default=1),
        "max_num_batched_tokens": max_num_batched_tokens or max(T, 1),
        "chunk_size": chunk_size,
    }
    return V4Problem(arguments, positions, entries, limits)


def answer(problem: V4Problem) -> tuple[Tensor, Tensor, Tensor]:
    """out, max_logits and lse in float64, token by token from the unpaged keys."""
    q, sink = problem.arguments["q"].double(), problem.arguments["attn_sink"]
    T, H, _ = q.shape
    out, stats = torch.zeros(T, H, 512).double(), torch.zeros(2, T, H).double()
    for t in range(T):
        keys = problem.keys(t).double()
        z = q[t] @ keys.T * problem.arguments["sm_scale"]
        stats[0, t], stats[1, t] = z.amax(-1), torch.logsumexp(z, -1)
        total = stats[1, t]
        if sink is not None:
            total = torch.logaddexp(total, sink.double())
        out[t] = torch.exp(z - total[:, None]) @ keys
    return out, stats[0], stats[1]
