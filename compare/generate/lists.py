"""The indexer's lists: which keys, or which compressed entries of a V4 batch, each token chose."""

from __future__ import annotations

import numpy as np

from compare.generate.blocks import in_blocks
from compare.generate.streams import Stream, below, rows_of
from compare.generate.v4_batch import V4Batch


def positions(batch: V4Batch) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T] each: the request of every token and its position."""
    return token_positions(batch.seq, batch.q)


def token_positions(
    lengths: tuple[int, ...], queries: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T] each: the request of every token and its position, the request's last ones; below
    0 where it has more tokens than keys.
    """
    totals, counts = np.array(lengths, np.int64), np.array(queries, np.int64)
    request = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return request, (totals - counts - firsts)[request] + np.arange(len(request))


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
    return drawn_lists(
        (position + 1) // batch.ratio,
        listed_entries(batch),
        batch.topk,
        batch.seed,
        picks=Stream.V4_PICK,
        order=None if batch.ratio == 128 else Stream.V4_ORDER,
    )


def drawn_lists(
    seen: np.ndarray,
    listed: np.ndarray,
    width: int,
    seed: int,
    *,
    picks: Stream,
    order: Stream | None,
) -> np.ndarray:
    """[T, width] int32: listed[t] distinct numbers below seen[t], one of each of as many equal
    parts, then -1. order: the stream that shuffles them; None: they ascend.
    """
    lists = np.full((len(seen), width), -1, np.int32)

    def fill(start: int, end: int) -> None:
        column = np.arange(width + 1)
        count = np.maximum(listed[start:end, None], 1)
        edges = np.minimum(column, count) * seen[start:end, None] // count
        words = rows_of(seed, picks, start, end, width)
        drawn = edges[:, :-1] + below(words, np.maximum(np.diff(edges), 1))
        held = column[:-1] < listed[start:end, None]
        if order is not None:
            keys = rows_of(seed, order, start, end, width) >> np.uint64(1)
            keys = np.where(held, keys, np.uint64(2**63))
            places = np.argsort(keys, axis=1, kind="stable")
            drawn = np.take_along_axis(drawn, places, axis=1)
        lists[start:end] = np.where(held, drawn, -1)

    in_blocks(fill, len(seen), width)
    return lists
