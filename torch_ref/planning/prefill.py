"""Prefill chunk planning: how a batch of requests is cut to fit one workspace.

A chunk of c requests gathers its keys into a workspace of c * M rows: for each request N rows of
compressed keys and M - N rows of window and query keys, where N and M - N are the largest that any
request of the chunk needs. Requests join a chunk in order as long as c * M fits the area limit.

Two sets of rules exist. As vLLM 0.33.0 ships them (`get_prefill_chunk_plan` in
vllm/v1/attention/backends/mla/sparse_swa.py) every request takes part, so requests without query
tokens can form a chunk of their own, and FlashMLA aborts on its empty query. By the fixed rules
(vllm-project/vllm#51489) only a request with query tokens starts a chunk or extends one; a
zero-query request that lies between two of a chunk stays in it and is given its rows, since both
gathers write every request of the range. The area grows with every request, so a chunk that holds
two requests holds all that lies between them.

Smallest example: lengths 40 and 40 with query lengths 0 and 5, compress ratio 4, window 8 and an
area of 40 rows. Shipped: chunk [0, 1) without a query token, then [1, 2). Fixed: [1, 2) alone.

Plain integers, no tensors. Requests and tokens are counted from the first prefill request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, SupportsIndex

from torch_ref.planning._arguments import at_least, lengths

Rules = Literal["fixed", "vllm-0.33.0"]


@dataclass(frozen=True)
class PrefillChunk:
    """Requests [start, end) with their tokens [query_start, query_end), all in one workspace.

    compressed_rows is N, workspace_rows is M: of each request's M rows the first N hold compressed
    keys, the others the window's and the query's own.
    """

    start: int
    end: int
    compressed_rows: int
    workspace_rows: int
    query_start: int
    query_end: int

    @property
    def area(self) -> int:
        """Workspace rows of the whole chunk."""
        return (self.end - self.start) * self.workspace_rows

    @property
    def empty(self) -> bool:
        """No query token: FlashMLA must not be called."""
        return self.query_end <= self.query_start


def plan_prefill_chunks(
    seq_lens: Sequence[SupportsIndex],
    query_lens: Sequence[SupportsIndex],
    *,
    compress_ratio: int,
    window: int = 128,
    max_model_len: int,
    max_num_batched_tokens: int,
    chunk_size: int = 4,
    has_compressed: bool | None = None,
    rules: Rules = "fixed",
) -> tuple[PrefillChunk, ...]:
    """Cuts a batch of prefill requests into chunks; () if there is nothing to do.

    seq_lens are context lengths with this step's tokens, query_lens this step's tokens (0 allowed);
    both in tokens, one per request. compress_ratio is the layer's; has_compressed says whether it
    gathers compressed keys, None meaning compress_ratio > 1. window is the sliding window,
    chunk_size the factor in the area limit, not a cap on requests.

    A single request larger than the area limit still gets a chunk of its own.

    ValueError: lengths that differ in number, aren't whole or are negative; sizes below 1; a ratio
    below 1 for a layer with compressed keys; unknown rules.
    """
    if rules not in ("fixed", "vllm-0.33.0"):
        raise ValueError(f"rules: {rules!r}; accepted are 'fixed' and 'vllm-0.33.0'")
    seq_lens, queries = lengths("seq_lens", seq_lens), lengths("query_lens", query_lens)
    gather = gather_lens(seq_lens, queries, window=window)
    compressed = compressed_lens(
        seq_lens, compress_ratio=compress_ratio, has_compressed=has_compressed
    )
    limit = workspace_area_limit(
        compress_ratio=compress_ratio,
        window=window,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        chunk_size=chunk_size,
        has_compressed=has_compressed,
    )
    everyone = range(len(queries))
    members = everyone if rules == "vllm-0.33.0" else [i for i in everyone if queries[i] > 0]
    first_token = [0, *accumulate(queries)]
    return tuple(
        PrefillChunk(start, end, N, N + G, first_token[start], first_token[end])
        for start, end, N, G in _group(members, compressed, gather, limit)
    )


def _group(
    members: Iterable[int], compressed: Sequence[int], gather: Sequence[int], limit: int
) -> list[tuple[int, int, int, int]]:
    """Ranges (start, end, N, M - N) that begin and end with a member, each as long as it fits."""
    groups: list[tuple[int, int, int, int]] = []
    for i in members:
        if groups:
            start, end, N, G = groups[-1]
            N = max(N, *compressed[end : i + 1])
            G = max(G, *gather[end : i + 1])
            if (i + 1 - start) * (N + G) <= limit:
                groups[-1] = (start, i + 1, N, G)
                continue
        groups.append((i, i + 1, compressed[i], gather[i]))
    return groups


def compressed_lens(
    seq_lens: Sequence[SupportsIndex], *, compress_ratio: int, has_compressed: bool | None = None
) -> tuple[int, ...]:
    """Compressed keys of each request: floor(seq_len / ratio), 0 for a layer that has none."""
    seqs = lengths("seq_lens", seq_lens)
    if not gathers_compressed(compress_ratio, has_compressed):
        return (0,) * len(seqs)
    return tuple(length // compress_ratio for length in seqs)


def gather_lens(
    seq_lens: Sequence[SupportsIndex], query_lens: Sequence[SupportsIndex], *, window: int = 128
) -> tuple[int, ...]:
    """Uncompressed keys of each request: its query, and of its prefix at most window - 1 tokens.

    A query token sees the window that ends with itself, so the first one reaches back window - 1.
    """
    at_least("window", window)
    seqs, queries = lengths("seq_lens", seq_lens), lengths("query_lens", query_lens)
    if len(seqs) != len(queries):
        raise ValueError(
            f"query_lens: {len(queries)} requests; seq_lens has {len(seqs)}, one each is needed"
        )
    return tuple(
        query + min(max(length - query, 0), window - 1)
        for length, query in zip(seqs, queries, strict=True)
    )


def workspace_area_limit(
    *,
    compress_ratio: int,
    window: int = 128,
    max_model_len: int,
    max_num_batched_tokens: int,
    chunk_size: int = 4,
    has_compressed: bool | None = None,
) -> int:
    """Workspace rows that a chunk of several requests may take: chunk_size of the largest one."""
    for name, value in (
        ("window", window),
        ("max_model_len", max_model_len),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("chunk_size", chunk_size),
    ):
        at_least(name, value)
    compressed = 0
    if gathers_compressed(compress_ratio, has_compressed):
        compressed = -(-max_model_len // compress_ratio)
    return chunk_size * (compressed + window + max_num_batched_tokens)


def gathers_compressed(compress_ratio: int, has_compressed: bool | None = None) -> bool:
    """Whether a layer gathers compressed keys: ratio > 1, unless has_compressed says it.

    V4.1 has layers of ratio 1 with a compressed region, and writes ratio 0 for window-only ones.
    """
    at_least("compress_ratio", compress_ratio, 0)
    if has_compressed is not None and not isinstance(has_compressed, bool):
        raise ValueError(f"has_compressed: {has_compressed!r}; accepted are True, False and None")
    if has_compressed is None:
        return compress_ratio > 1
    if has_compressed and compress_ratio < 1:
        raise ValueError(
            f"compress_ratio: {compress_ratio} with has_compressed=True; accepted are 1 and more"
        )
    return has_compressed
