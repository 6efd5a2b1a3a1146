"""The indexer's lists of a v4-prefill case: which compressed entries each token chose."""

from __future__ import annotations

import numpy as np

from compare.generate.blocks import in_blocks
from compare.generate.streams import Stream, below, rows_of
from compare.suites.v4_prefill.case import V4PrefillCase


def positions(case: V4PrefillCase) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T] each: the request of every token and its position."""
    lengths, queries = np.array(case.seq, np.int64), np.array(case.q, np.int64)
    request = np.repeat(np.arange(len(queries)), queries)
    firsts = np.cumsum(queries) - queries
    return request, (lengths - queries - firsts)[request] + np.arange(len(request))


def listed_entries(case: V4PrefillCase) -> np.ndarray:
    """int64 [T]: how many entries a token's list has, min((position + 1) // ratio, topk)."""
    _, position = positions(case)
    return np.minimum((position + 1) // case.ratio, case.listed)


def topk_indices(case: V4PrefillCase) -> np.ndarray | None:
    """[T, topk] int32, or None: distinct entries that the token sees, one of each of as many
    equal parts, in any order (with ratio 128, where the engine lists all, ascending), then -1.
    """
    if case.ratio == 1:
        return None
    _, position = positions(case)
    seen, listed = (position + 1) // case.ratio, listed_entries(case)
    lists = np.full((case.tokens, case.topk), -1, np.int32)

    def fill(start: int, end: int) -> None:
        column = np.arange(case.topk + 1)
        count = np.maximum(listed[start:end, None], 1)
        edges = np.minimum(column, count) * seen[start:end, None] // count
        words = rows_of(case.seed, Stream.V4_PICK, start, end, case.topk)
        picks = edges[:, :-1] + below(words, np.maximum(np.diff(edges), 1))
        held = column[:-1] < listed[start:end, None]
        if case.ratio != 128:
            keys = rows_of(case.seed, Stream.V4_ORDER, start, end, case.topk) >> np.uint64(1)
            keys = np.where(held, keys, np.uint64(2**63))
            order = np.argsort(keys, axis=1, kind="stable")
            picks = np.take_along_axis(picks, order, axis=1)
        lists[start:end] = np.where(held, picks, -1)

    in_blocks(fill, case.tokens, case.topk)
    return lists
