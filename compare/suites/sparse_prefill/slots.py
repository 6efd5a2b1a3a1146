"""The index lists of a sparse prefill case: which kv row each top-k slot names, and which slots
are valid.
"""

from __future__ import annotations

import numpy as np

from compare.generate.streams import Stream, below, raw, rows_of
from compare.suites.sparse_prefill.case import SparsePrefillCase


def topk_length(case: SparsePrefillCase) -> np.ndarray | None:
    """[T] int32, or None; ragged is FlashMLA's distribution: U[0, max(K + 1, 64)) clamped to K."""
    if case.length == "none":
        return None
    if case.length == "ragged":
        words = raw(case.seed, Stream.LENGTH, 0, (case.tokens,))
        drawn = below(words, max(case.topk + 1, 64))
        return np.minimum(drawn, case.topk).astype(np.int32)
    fixed = {"full": case.topk, "zero": 0}.get(str(case.length), case.length)
    return np.full(case.tokens, fixed, np.int32)


def fillers(s_kv: int) -> np.ndarray:
    """The out-of-range values that stand in invalid slots, all of them invalid for this s_kv."""
    int32 = np.iinfo(np.int32)
    return np.array(
        [int32.min, -123456, -1, s_kv, s_kv + 1, s_kv + 123456, 2147480000, int32.max], np.int32
    )


def holes(case: SparsePrefillCase, start: int, end: int) -> np.ndarray:
    """bool [rows, K]: slots whose index is out of range, by `invalid`, `empty_rows` and K > S."""
    words = rows_of(case.seed, Stream.HOLE, start, end, case.topk)
    threshold = np.uint64(round(case.invalid * 2**32))
    hole = (words & np.uint64(0xFFFFFFFF)) < threshold
    hole[:, case.s_kv :] = True
    hole[_is_empty(case)[start:end]] = True
    return hole


def _is_empty(case: SparsePrefillCase) -> np.ndarray:
    """bool [T]: the `empty_rows` tokens without a valid slot."""
    empty = np.zeros(case.tokens, bool)
    order = np.argsort(raw(case.seed, Stream.EMPTY, 0, (case.tokens,)), kind="stable")
    empty[order[: case.empty_rows]] = True
    return empty


def put_fillers(case: SparsePrefillCase, indices: np.ndarray, hole: np.ndarray, start: int) -> None:
    """Writes an out-of-range value into every hole of a block of rows, in place."""
    words = rows_of(case.seed, Stream.HOLE, start, start + len(indices), case.topk)
    choice = fillers(case.s_kv)[below(words, 8)]
    np.copyto(indices, choice, where=hole)


def random_indices(case: SparsePrefillCase, start: int, end: int) -> np.ndarray:
    """[rows, K] int32: distinct rows of kv (each slot draws from its own stratum), then shuffled;
    with order=dup every second slot repeats its neighbour. Where K > S the row starts with a
    permutation of all S rows.
    """
    width = min(case.topk, case.s_kv)
    indices = np.zeros((end - start, case.topk), np.int32)
    if width:
        edges = np.arange(width + 1, dtype=np.int64) * case.s_kv // width
        words = rows_of(case.seed, Stream.PICK, start, end, width)
        picks = edges[:-1] + below(words, np.diff(edges))
        if case.order == "dup":
            picks[:, 1::2] = picks[:, 0 : 2 * (width // 2) : 2]
        if case.order != "sorted":
            keys = rows_of(case.seed, Stream.ORDER, start, end, width)
            picks = np.take_along_axis(picks, np.argsort(keys, axis=1, kind="stable"), axis=1)
        indices[:, :width] = picks
    hole = holes(case, start, end)
    put_fillers(case, indices, hole, start)
    return indices
