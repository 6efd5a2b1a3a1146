"""data=exact of dcp-sparse: every score is 0 or at most -1000, so P is 0 or 1.

A key belongs to one of four groups, shown by a one-hot 8 in the last four columns. A query holds 0
under the group that it looks for, that of one of its chosen keys, and a large negative number under
the others. Values are integers in [-8, 8]. The first 64 columns of q are pairs (a, -a) over equal
pairs of kv, which cancel exactly but must be read.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from compare.generate.streams import Stream, below, rows_of
from compare.suites.dcp_sparse.case import WIDTH, DcpSparseCase

GROUPS = 4
PAIRS = 32


def key_groups(case: DcpSparseCase, keys: int) -> np.ndarray:
    """int64 [keys]."""
    return below(rows_of(case.seed, Stream.GROUP, 0, keys, 1)[:, 0], GROUPS)


def exact_keys(case: DcpSparseCase, keys: int) -> np.ndarray:
    """[keys, 512] bfloat16."""
    values = below(rows_of(case.seed, Stream.DECODE_KV, 0, keys, WIDTH), 17) - 8
    values[:, 1 : 2 * PAIRS : 2] = values[:, 0 : 2 * PAIRS : 2]
    values[:, -GROUPS:] = 8 * (key_groups(case, keys)[:, None] == np.arange(GROUPS))
    return values.astype(np.float32).astype(ml_dtypes.bfloat16)


def exact_q(case: DcpSparseCase, listed: np.ndarray) -> np.ndarray:
    """[T, H, 512] bfloat16. listed [T, K]: the groups of the chosen keys, -1 behind them; head h
    looks for the group of key h, counted round.
    """
    tokens, heads = len(listed), np.arange(case.h)
    words = rows_of(case.seed, Stream.DECODE_Q, 0, tokens, case.h * PAIRS)
    half = (below(words, 9) - 4).reshape(tokens, case.h, PAIRS)
    q = np.zeros((tokens, case.h, WIDTH), np.float32)
    q[..., 0 : 2 * PAIRS : 2] = half
    q[..., 1 : 2 * PAIRS : 2] = -half
    count = np.maximum((listed >= 0).sum(axis=1), 1)
    wanted = np.take_along_axis(listed, heads % count[:, None], axis=1)
    strength = 2.0 ** np.ceil(np.log2(1000 / (8 * case.scale)))
    q[..., -GROUPS:] = np.where(wanted[..., None] == np.arange(GROUPS), 0.0, -strength)
    return q.astype(ml_dtypes.bfloat16)
