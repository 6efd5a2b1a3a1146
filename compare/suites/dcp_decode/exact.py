"""data=exact of decode: inputs on which the right answer has no rounding at all.

Each row (token, head) looks for one of up to four sets of its request's keys. Keys in the set have
a score of exactly 0, all others at most -1000, so that P is 0 or 1. With `top` the largest power of
two of keys that the request's first token sees, and b the bound of the row's token, the sets are

    the last 8, 64 and `top` visible keys: positions b - 8 and up, and so on
    the first `top` keys: positions below `top`

No set but the last has an upper end of its own: the keys past b are in it and are kept out by the
row's bound alone, so that one key too many or too few changes out and lse. Any run of n positions
holds n / W keys of every rank where W * I divides n; only such sets are looked for, so the number
of visible keys is a power of two on every rank and on all of them together. V holds integers in
[-8, 8]: out is exact up to its own final rounding, and lse is ln(count).

A key shows which sets it isn't in: for each size and token one column holds 8 below that token's
set and 0 in it, one more holds 8 from `top` on. A query holds a large negative number in the one
column that it goes by. These columns are rope columns, which no value holds. The first 64 columns
of q are pairs (a, -a) over equal pairs of kv, which cancel exactly but must be read.
"""

from __future__ import annotations

import numpy as np

from compare.generate.streams import Stream, below, rows_of
from compare.suites.dcp_decode.case import EXACT_TOKENS, KEY_WIDTH, VALUE_WIDTH, DcpDecodeCase

PAIRS = 32
SIZES = 3  # 8, 64, top
_FIRST_KEYS = VALUE_WIDTH + SIZES * EXACT_TOKENS
_MARK = 8


def exact_keys(case: DcpDecodeCase, request: int, row: int, start: int, end: int) -> np.ndarray:
    """float32 [end - start, 576]: the true values of the keys at positions [start, end) of a
    request, whose position 0 is row `row` of the stream.
    """
    words = rows_of(case.seed, Stream.DECODE_KV, row + start, row + end, KEY_WIDTH)
    keys = below(words, 17) - 8
    keys[:, 1 : 2 * PAIRS : 2] = keys[:, 0 : 2 * PAIRS : 2]
    keys[:, VALUE_WIDTH:] = 0
    total, queries = case.lens[request], case.q[request]
    if queries and total >= queries:
        position = np.arange(start, end)
        top = _top(total, queries)
        for place, size in enumerate(_sizes(top)):
            bounds = _bounds(total, queries, case.causal)
            column = VALUE_WIDTH + place * EXACT_TOKENS
            outside = position[:, None] < bounds - size
            keys[:, column : column + queries] = _MARK * outside
        keys[:, _FIRST_KEYS] = _MARK * (position >= top)
    return keys.astype(np.float32)


def exact_q(case: DcpDecodeCase, start: int, end: int) -> np.ndarray:
    """float32 [end - start, H, 576] of the rows [start, end) of q, none of which is padding."""
    words = rows_of(case.seed, Stream.DECODE_Q, start, end, case.h * PAIRS)
    half = (below(words, 9) - 4).reshape(end - start, case.h, PAIRS)
    q = np.zeros((end - start, case.h, KEY_WIDTH), np.float32)
    q[..., 0 : 2 * PAIRS : 2] = half
    q[..., 1 : 2 * PAIRS : 2] = -half
    strength = exact_strength(case)
    firsts = np.cumsum((0, *case.q))
    for t in range(start, end):
        request = int(np.searchsorted(firsts, t, side="right")) - 1
        token, top = t - int(firsts[request]), _top(case.lens[request], case.q[request])
        stripe = case.world * case.interleave
        columns = [
            VALUE_WIDTH + place * EXACT_TOKENS + token
            for place, size in enumerate(_sizes(top))
            if size <= top and size % stripe == 0
        ]
        columns.append(_FIRST_KEYS)
        for head in range(case.h):
            q[t - start, head, columns[(t + head) % len(columns)]] = -strength
    return q


def exact_strength(case: DcpDecodeCase) -> float:
    """How large the negative number in a query's one column is: a power of two, the largest
    magnitude in q.
    """
    return float(2.0 ** np.ceil(np.log2(1000 / (_MARK * case.scale))))


def _sizes(top: int) -> tuple[int, int, int]:
    return 8, 64, top


def _top(total: int, queries: int) -> int:
    """The largest power of two of keys that all tokens of a request see."""
    return 1 << ((total - queries + 1).bit_length() - 1)


def _bounds(total: int, queries: int, causal: bool) -> np.ndarray:
    """int64 [queries]: the exclusive bound of each token on the positions that it sees."""
    later = np.arange(queries - 1, -1, -1)
    return total - later if causal else np.full(queries, total)
