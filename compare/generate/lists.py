"""The indexer's lists of a V4 batch: which compressed entries each token chose."""

from __future__ import annotations

import numpy as np

from compare.generate.blocks import in_blocks
from compare.generate.streams import Stream, below, rows_of
from compare.generate.v4_batch import V4Batch


def positions(batch: V4Batch) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T] each: the request of every token and its position."""
    lengths, queries = np.array(batch.seq, np.int64), np.array(batch.q, np.int64)
    request = np.repeat(np.arange(len(queries)), queries)
    firsts = np.cumsum(queries) - queries
    return request, (lengths - queries - firsts)[request] + np.arange(len(request))


def listed_entries(batch: V4Batch) -> np.ndarray:
    """int64 [T]: how many entries a token's list has, min((position + 1) // ratio, topk)."""
    _, position = positions(batch)
    return np.minimum((position + 1) // batch.ratio, batch.listed)


def topk_indices(batch: V4Batch) -> np.ndarray | None:
    """[T, topk] int32, or None: distinct entries that the token sees, one of each of as many
    equal parts, in any order (with ratio 128, where the engine lists all, ascending), then -1.
    """
    if batch.ratio == 1:
        return None
    _, position = positions(batch)
    seen, listed = (position + 1) // batch.ratio, listed_entries(batch)
    lists = np.full((batch.tokens, batch.topk), -1, np.int32)

    def fill(start: int, end: int) -> None:
        column = np.arange(batch.topk + 1)
        count = np.maximum(listed[start:end, None], 1)
        edges = np.minimum(column, count) * seen[start:end, None] // count
        words = rows_of(batch.seed, Stream.V4_PICK, start, end, batch.topk)
        picks = edges[:, :-1] + below(words, np.maximum(np.diff(edges), 1))
        held = column[:-1] < listed[start:end, None]
        if batch.ratio != 128:
            keys = rows_of(batch.seed, Stream.V4_ORDER, start, end, batch.topk) >> np.uint64(1)
            keys = np.where(held, keys, np.uint64(2**63))
            order = np.argsort(keys, axis=1, kind="stable")
            picks = np.take_along_axis(picks, order, axis=1)
        lists[start:end] = np.where(held, picks, -1)

    in_blocks(fill, batch.tokens, batch.topk)
    return lists
