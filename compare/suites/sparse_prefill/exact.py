"""data=exact: inputs on which the right answer has no rounding at all.

Every kv row belongs to one of eight groups (its number modulo 8), shown by a one-hot 8 in eight
selector columns, the last of the row. A query holds 0 under the group that it looks for and a
large negative number under the
others: its score is exactly 0 for keys of that group and at most -1000 for all others, so P is 0
or 1. The number of visible keys in a row is a power of two, V holds integers in [-8, 8], hence
out is exact in bfloat16 up to its own final rounding and lse is ln(count). The first 64 columns
of q are pairs (a, -a) over equal pairs of kv, which cancel exactly but must be read.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from compare.generate.streams import Stream, below, rows_of
from compare.suites.sparse_prefill.case import EXACT_GROUPS as GROUPS
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.slots import holes, put_fillers

CLASSES = 4  # groups 0..3 are looked for, 4..7 never
PAIRS = 32


def exact_kv(case: SparsePrefillCase, start: int, end: int) -> np.ndarray:
    """[rows, D] bfloat16."""
    words = rows_of(case.seed, Stream.KV, start, end, case.d)
    values = below(words, 17) - 8
    values[:, 1 : 2 * PAIRS : 2] = values[:, 0 : 2 * PAIRS : 2]
    group = np.arange(start, end) % GROUPS
    values[:, -GROUPS:] = 8 * (group[:, None] == np.arange(GROUPS))
    return values.astype(np.float32).astype(ml_dtypes.bfloat16)


def exact_indices(
    case: SparsePrefillCase, start: int, end: int, lengths: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """indices [rows, K] int32 and classes [rows]: how many groups (1, 2 or 4) are looked for in
    each row.

    Of n valid slots, C * 2^a are dealt to groups 0..C-1 in equal parts and the rest to groups
    4..7. Slots past the length name keys of groups 0..3, so that a kernel that reads them is
    seen.
    """
    rows, width = end - start, case.topk
    hole = holes(case, start, end)
    past = np.zeros((rows, width), bool)
    if lengths is not None:
        past = np.arange(width) >= lengths[start:end, None]
    valid = ~(hole | past)
    count = valid.sum(axis=1)

    keys = rows_of(case.seed, Stream.ORDER, start, end, width) >> np.uint64(1)
    keys = np.where(valid, keys, np.uint64(2**63))
    rank = np.empty((rows, width), np.int64)
    np.put_along_axis(
        rank, np.argsort(keys, axis=1, kind="stable"), np.arange(width)[None, :], axis=1
    )

    classes = np.where(count >= 4, 4, np.where(count >= 2, 2, 1))
    draw = rows_of(case.seed, Stream.GROUP, start, end, 4)
    each = np.maximum(count // classes, 1)
    most = np.frexp(each.astype(np.float64))[1] - 1  # floor(log2 each), exact
    visible = classes << below(draw[:, 0], most + 1)

    words = rows_of(case.seed, Stream.PICK, start, end, width)
    low = (words & np.uint64(3)).astype(np.int64)
    group = np.where(rank < visible[:, None], rank % classes[:, None], CLASSES + low)
    group = np.where(valid, group, low)
    members = (case.s_kv - 1 - group) // GROUPS + 1
    indices = (below(words, members) * GROUPS + group).astype(np.int32)
    put_fillers(case, indices, hole, start)
    return indices, classes


def exact_q(case: SparsePrefillCase, start: int, end: int, classes: np.ndarray) -> np.ndarray:
    """[rows, H, D] bfloat16; head h of token t looks for group (h + t) mod C."""
    words = rows_of(case.seed, Stream.Q, start, end, case.h * PAIRS)
    half = (below(words, 9) - 4).reshape(end - start, case.h, PAIRS)
    q = np.zeros((end - start, case.h, case.d), np.float32)
    q[..., 0 : 2 * PAIRS : 2] = half
    q[..., 1 : 2 * PAIRS : 2] = -half
    wanted = (np.arange(start, end)[:, None] + np.arange(case.h)) % classes[:, None]
    strength = 2.0 ** np.ceil(np.log2(1000 / (8 * case.scale)))
    q[..., -GROUPS:] = np.where(wanted[..., None] == np.arange(GROUPS), 0.0, -strength)
    return q.astype(ml_dtypes.bfloat16)
