"""Chunks of a sparse-prefill batch: consecutive requests that share one workspace and one launch.

A layer's prefill first gathers, for each request of a chunk, its compressed entries and the
recent rows of its sliding window into a bf16 workspace kv[requests, M, 512]: columns [0, N) are
compressed, columns [N, M) are window rows. One kernel launch then serves all query tokens of the
chunk. The planner decides where a chunk ends: as late as the workspace area allows.

A request without query tokens (graph padding, a request whose KV is still being transferred)
needs no launch. It never opens or closes a chunk; between two requests that do have tokens it may
stay inside one, and then its rows are paid for and its lengths are covered like any other's.

Sources: "VL" is vLLM 0.33.0, vllm/v1/attention/backends/mla/sparse_swa.py; "PR-A" is
vllm-project/vllm#51489, which asks that zero-query requests never form a chunk of their own.
docs/planning-rules.md states the invariants P1 to P7 that a plan satisfies.

Cost: linear in the number of requests, zero-query ones included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from jax_impl.planning._arguments import Lengths, integer, lengths, query_and_context_lens


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One launch: a half-open range of requests, their workspace and their query tokens.

    Request indices and query tokens both count from the batch's first prefill request, so
    `q[query_start:query_end]` cuts the chunk's rows out of the prefill part of q.

    Attributes:
        start: first request; it has at least one query token.
        end: one past the last request; the request before it has at least one query token.
        compressed_rows: N, workspace columns for compressed entries, in rows per request.
        workspace_rows: M, all workspace columns, in rows per request; [N, M) hold window rows.
        query_start: first query token.
        query_end: one past the last query token; always greater than query_start.
    """

    start: int
    end: int
    compressed_rows: int
    workspace_rows: int
    query_start: int
    query_end: int


def compressed_lens(
    seq_lens: Lengths, *, compress_ratio: int, has_compressed: bool | None = None
) -> tuple[int, ...]:
    """Compressed entries of each request: floor(seq_len / compress_ratio), or 0 without any.

    Rule (VL `get_prefill_chunk_plan`): an entry exists once all `compress_ratio` positions that
    it covers do, so a started group of positions counts for nothing.

    >>> compressed_lens([3, 4, 7, 8], compress_ratio=4)
    (0, 1, 1, 2)

    Rule (VL, the same): a layer has compressed entries if its ratio is above 1. The exception
    is told by `has_compressed`: with ratio 1, one entry per token. Ratios 0 and 1 otherwise mean
    sliding window only.

    >>> compressed_lens([3, 4], compress_ratio=1)
    (0, 0)
    >>> compressed_lens([3, 4], compress_ratio=1, has_compressed=True)
    (3, 4)

    Args:
        seq_lens: context of each request including this step's tokens, [B] tokens.
        compress_ratio: tokens per compressed entry, >= 0.
        has_compressed: whether the layer has compressed entries; None derives it.

    Raises:
        ValueError: an argument is out of its range, or has_compressed is True at ratio 0.
    """
    compressed = _has_compressed(compress_ratio, has_compressed)
    contexts = lengths("seq_lens", seq_lens)
    if not compressed:
        return (0,) * len(contexts)
    ratio = int(compress_ratio)
    return tuple(context // ratio for context in contexts)


def gather_lens(seq_lens: Lengths, query_lens: Lengths, *, window: int = 128) -> tuple[int, ...]:
    """Sliding-window rows of each request: query_len + min(seq_len - query_len, window - 1).

    Rule (VL `get_prefill_chunk_plan`, the host's upper bound of ComputePrefillMetadataKernel):
    the first query token sees itself and the window - 1 rows before it, as far as there are any;
    each further token brings its own row. With window 4: a prompt from its start, one with 2
    rows before it, one with more than the window before it.

    >>> gather_lens([5, 5, 300], [5, 3, 1], window=4)
    (5, 5, 4)

    Rule (the same): a request without query tokens would still gather its last window - 1 rows.

    >>> gather_lens([300, 0], [0, 0], window=4)
    (3, 0)

    Args:
        seq_lens: context of each request including this step's tokens, [B] tokens.
        query_lens: query tokens of each request, [B] tokens.
        window: tokens that a query sees of the sliding window, itself included, >= 1.

    Raises:
        ValueError: an argument is out of its range, or a query is longer than its context.
    """
    before = integer("window", window, least=1) - 1
    contexts, queries = query_and_context_lens(seq_lens, query_lens)
    return tuple(
        query + min(context - query, before)
        for context, query in zip(contexts, queries, strict=True)
    )


def max_workspace_area(
    *,
    compress_ratio: int,
    window: int = 128,
    max_model_len: int,
    max_num_batched_tokens: int,
    chunk_size: int = 4,
    has_compressed: bool | None = None,
) -> int:
    """The most rows, requests times M, that a chunk of several requests may take.

    Rule (VL `get_prefill_chunk_plan`): room for `chunk_size` requests of the largest size that
    the engine admits. Such a request has ceil(max_model_len / compress_ratio) compressed entries
    and gathers at most a window and a full step of tokens.

    >>> max_workspace_area(compress_ratio=4, window=8, max_model_len=64,
    ...                    max_num_batched_tokens=16, chunk_size=1)
    40
    >>> max_workspace_area(compress_ratio=4, window=8, max_model_len=65,
    ...                    max_num_batched_tokens=16, chunk_size=1)
    41

    Without compressed entries the model's length does not enter.

    >>> max_workspace_area(compress_ratio=1, window=8, max_model_len=64,
    ...                    max_num_batched_tokens=16, chunk_size=2)
    48

    Args:
        compress_ratio, window, has_compressed: as in `compressed_lens` and `gather_lens`.
        max_model_len: longest context that the engine admits, tokens, >= 1.
        max_num_batched_tokens: most query tokens of one step, >= 1.
        chunk_size: largest-size requests that the workspace holds, >= 1. It limits the area,
            not the number of requests: many short ones may share a chunk.

    Raises:
        ValueError: an argument is out of its range.
    """
    compressed = _has_compressed(compress_ratio, has_compressed)
    model_len = integer("max_model_len", max_model_len, least=1)
    largest_compressed = -(-model_len // int(compress_ratio)) if compressed else 0
    largest_gather = integer("window", window, least=1) + integer(
        "max_num_batched_tokens", max_num_batched_tokens, least=1
    )
    requests = integer("chunk_size", chunk_size, least=1)
    return requests * (largest_compressed + largest_gather)


def plan_prefill_chunks(
    seq_lens: Lengths,
    query_lens: Lengths,
    *,
    compress_ratio: int,
    window: int = 128,
    max_model_len: int,
    max_num_batched_tokens: int,
    chunk_size: int = 4,
    has_compressed: bool | None = None,
) -> tuple[PrefillChunk, ...]:
    """Cut the prefill requests of a batch into chunks, none of them empty.

    The examples use ratio 1 (no compressed entries) and window 1 (a request gathers just its
    query tokens), so that a workspace row is a query token; the area is 1 + tokens.

    >>> def ranges(query_lens, tokens, seq_lens=None, **other):
    ...     settings = dict(compress_ratio=1, window=1, max_model_len=64, chunk_size=1) | other
    ...     plan = plan_prefill_chunks(seq_lens or query_lens, query_lens,
    ...                                max_num_batched_tokens=tokens, **settings)
    ...     return [(c.start, c.end, c.compressed_rows, c.workspace_rows) for c in plan]

    Rule (VL): a chunk grows while requests * M stays within `max_workspace_area`, equality
    included; nothing else limits the number of its requests. Area 4:

    >>> ranges([1, 1, 1, 1], tokens=3)
    [(0, 4, 0, 1)]
    >>> ranges([1, 1, 1, 1, 1], tokens=3)
    [(0, 4, 0, 1), (4, 5, 0, 1)]

    Rule (VL): N and M - N are maxima over the chunk, taken apart. One request here has 4
    compressed entries and 1 window row, the other 2 and 4: together 2 * (4 + 4) = 16 rows, though
    neither needs more than 6. Areas 16 and 15:

    >>> two = dict(seq_lens=[8, 4], compress_ratio=2, max_model_len=8)
    >>> ranges([1, 4], tokens=11, **two)
    [(0, 2, 4, 8)]
    >>> ranges([1, 4], tokens=10, **two)
    [(0, 1, 4, 5), (1, 2, 2, 6)]

    Rule (VL): the first request of a chunk is taken whatever its size. Only sizes that the
    engine does not admit exceed the area alone. Area 4:

    >>> ranges([5, 1], tokens=3)
    [(0, 1, 0, 5), (1, 2, 0, 1)]

    Rule (PR-A): requests without query tokens are passed over in front of a chunk and dropped
    behind its last request that has some. Nothing to compute, nothing planned.

    >>> ranges([0, 1, 0], tokens=3)
    [(1, 2, 0, 1)]
    >>> ranges([0, 0], tokens=3), ranges([], tokens=3)
    ([], [])

    Rule (this project's reading of PR-A): between two requests that share a chunk, one without
    query tokens stays, and takes a workspace row. 3 * 2 = 6 rows; areas 6 and 5:

    >>> ranges([2, 0, 1], tokens=5)
    [(0, 3, 0, 2)]
    >>> ranges([2, 0, 1], tokens=4)
    [(0, 1, 0, 2), (2, 3, 0, 1)]

    Rule (the same): since both gathers run over every request of the chunk and clamp nothing to
    M, N and M also cover the ones without query tokens; else their rows spill into the next
    request's. When it is in no chunk, its context sizes none. Areas 15 and 14:

    >>> waiting = dict(seq_lens=[1, 8, 1], compress_ratio=2, max_model_len=8)
    >>> ranges([1, 0, 1], tokens=10, **waiting)
    [(0, 3, 4, 5)]
    >>> ranges([1, 0, 1], tokens=9, **waiting)
    [(0, 1, 0, 1), (2, 3, 0, 1)]

    Args:
        seq_lens: context of each prefill request including this step's tokens, [B] tokens:
            integers, or an integer array that NumPy can read. An upper bound is enough, and N
            and M are upper bounds then.
        query_lens: query tokens of each prefill request, [B] tokens, 0 allowed,
            query_len <= seq_len.
        compress_ratio: tokens per compressed entry; 0 and 1 mean sliding window only, unless
            has_compressed is True (ratio 1: one entry per token).
        window: sliding window in tokens, the query's own included, >= 1.
        max_model_len: longest context that the engine admits, tokens, >= 1.
        max_num_batched_tokens: most query tokens of one step, >= 1. This and max_model_len size
            the area only: a longer request is planned all the same.
        chunk_size: largest-size requests that the workspace holds, >= 1.
        has_compressed: whether the layer has compressed entries; None derives it.

    Returns:
        Chunks in ascending order; their query ranges tile all query tokens. Empty when no
        request has query tokens.

    Raises:
        ValueError: an argument is out of its range, not of integers, or the two lengths differ.
    """
    contexts, queries = query_and_context_lens(seq_lens, query_lens)
    compressed = compressed_lens(
        contexts, compress_ratio=compress_ratio, has_compressed=has_compressed
    )
    gathered = gather_lens(contexts, queries, window=window)
    max_area = max_workspace_area(
        compress_ratio=compress_ratio,
        window=window,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        chunk_size=chunk_size,
        has_compressed=has_compressed,
    )
    token_offsets = (0, *accumulate(queries))
    return tuple(
        PrefillChunk(start, end, n, m, token_offsets[start], token_offsets[end])
        for start, end, n, m in _request_ranges(queries, compressed, gathered, max_area)
    )


def _request_ranges(
    queries: Sequence[int], compressed: Sequence[int], gathered: Sequence[int], max_area: int
) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, N, M) of each chunk."""
    start = 0
    while True:
        while start < len(queries) and queries[start] == 0:
            start += 1
        if start == len(queries):
            return
        n, window_rows = compressed[start], gathered[start]
        # A request without tokens is taken in on trial: it belongs to the chunk only once one
        # with tokens follows it there, and until then the accepted widths leave its lengths out.
        end, accepted_n, accepted_m = start + 1, n, n + window_rows
        for i in range(start + 1, len(queries)):
            n, window_rows = max(n, compressed[i]), max(window_rows, gathered[i])
            if (i + 1 - start) * (n + window_rows) > max_area:
                break
            if queries[i] > 0:
                end, accepted_n, accepted_m = i + 1, n, n + window_rows
        yield start, end, accepted_n, accepted_m
        start = end


def _has_compressed(compress_ratio: int, has_compressed: bool | None) -> bool:
    ratio = integer("compress_ratio", compress_ratio, least=0)
    if has_compressed is None:
        return ratio > 1
    if not isinstance(has_compressed, bool):
        raise ValueError(f"has_compressed: {has_compressed!r}; accepted: True, False or None")
    if has_compressed and ratio == 0:
        raise ValueError(
            "compress_ratio: 0 with has_compressed True; accepted: a ratio >= 1 for a layer "
            "with compressed entries (0 means sliding window only)"
        )
    return has_compressed
