"""Pages of caches: which tokens of a request lie on them, where, and in what order.

A request of a V4 batch has pages only for what is gathered of it: its last positions, and its
compressed entries. Where there is poison, what lies on a request's pages besides, and the pages
that no request has, are NaN, and the block-table entries that no token needs name pages that don't
exist or are another request's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from compare.generate.blocks import in_blocks
from compare.generate.streams import Stream, below, raw
from compare.generate.tokens import PagedCache, Tokens
from compare.generate.v4_batch import WIDTH, V4Batch
from compare.generate.wide_tokens import FORMATS, WidePagedCache, WideTokens

SPARE_PAGES = 2
OUT_OF_RANGE = (1_000_000, -5)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """cache: without tokens yet. block_table [n, columns] int32."""

    cache: PagedCache | WidePagedCache
    block_table: np.ndarray


def held_tokens(batch: V4Batch, *, compressed: bool) -> list[tuple[int, int]]:
    """Of each request, the tokens [first, end) that a cache holds."""
    if compressed:
        return [(0, batch.compressed(request)) for request in range(len(batch.seq))]
    return [(length - batch.gathered(request), length) for request, length in enumerate(batch.seq)]


def lay_out(batch: V4Batch, spans: Sequence[tuple[int, int]], *, compressed: bool) -> Layout:
    """An empty cache of a V4 batch for the tokens [first, end) of each request."""
    streams = Stream.V4_WINDOW_PAGES, Stream.V4_WINDOW_STALE
    if compressed:
        streams = Stream.V4_COMPRESSED_PAGES, Stream.V4_COMPRESSED_STALE
    page = batch.compressed_page if compressed else batch.page
    return lay_out_spans(spans, page, batch.format, batch.seed, streams, poison=batch.poison)


def lay_out_spans(
    spans: Sequence[tuple[int, int]],
    page: int,
    kv_format: str,
    seed: int,
    streams: tuple[Stream, Stream],
    *,
    poison: bool,
) -> Layout:
    """An empty cache for the tokens [first, end) of each request, its pages in a shuffled order.

    streams: of that order, and of the entries that no token needs.
    """
    columns = [
        (first // page, -(-end // page) if end > first else first // page) for first, end in spans
    ]
    before = np.cumsum((0, *(stop - start for start, stop in columns)))
    pages = int(before[-1]) + SPARE_PAGES
    order = np.argsort(raw(seed, streams[0], 0, (pages,)), kind="stable")
    width = max((1, *(stop for _, stop in columns))) + poison
    table = np.zeros((len(spans), width), np.int32)
    needed = np.zeros(table.shape, bool)
    for request, (start, stop) in enumerate(columns):
        table[request, start:stop] = order[before[request] : before[request + 1]]
        needed[request, start:stop] = True
    if poison:
        words = raw(seed, streams[1], 0, (table.size,)).reshape(table.shape)
        _put_stale_entries(table, needed, order[:-SPARE_PAGES], words)
    kind = WidePagedCache if kv_format in FORMATS else PagedCache
    cache = kind(kv_format, pages, page, poison=poison)
    return Layout(cache=cache, block_table=table)


def write_tokens(
    cache: Any,
    pages: np.ndarray,
    first: int,
    end: int,
    made: Callable[[int, int], Tokens | WideTokens],
) -> None:
    """Puts a request's tokens [first, end) on its pages; made(low, high) are those of a range, of
    the kind that the cache holds.
    """

    def fill(low: int, high: int) -> None:
        token = np.arange(first + low, first + high)
        tokens = made(first + low, first + high)
        cache.write(pages[token // cache.page], token % cache.page, tokens)

    in_blocks(fill, end - first, WIDTH)


def _put_stale_entries(
    table: np.ndarray, needed: np.ndarray, pages: np.ndarray, words: np.ndarray
) -> None:
    """Writes into every entry that no token needs, in place. pages: those that are somebody's;
    words: a random one for each entry.
    """
    kind = (words & np.uint64(3)).astype(np.int64)
    others = pages[below(words, len(pages))] if len(pages) else 0
    garbage = np.where(kind < 2, np.array(OUT_OF_RANGE)[kind & 1], others)
    np.copyto(table, garbage.astype(np.int32), where=~needed)
