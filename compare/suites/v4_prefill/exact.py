"""data=exact of v4-prefill: inputs on which the right answer has no rounding at all.

Each row (token, head) looks for one of four sets of the keys that the token sees. Keys in the set
have a score of exactly 0, all others at most -1000, so that P is 0 or 1. With n keys in the token's
list, its compressed entries first, and `top` the largest power of two of n, the sets are

    the first `top` of the list, the last `top`, and two drawn ones of a power of two of keys

so that every key of the list is in a set of some head. A key that the token doesn't see is in all
four, and is kept out by the token's list alone: one key too many or too few changes out and lse. V
holds integers in [-8, 8]: out is exact up to its own final rounding, and lse is ln(count).

For each of a request's tokens and each set one of the 64 rope columns holds 8 in the keys outside
the set and 0 in it; a query holds a large negative number in the one column that it goes by. The
first 64 columns of q are pairs (a, -a) over equal pairs of kv, which cancel exactly but must be
read.
"""

from __future__ import annotations

import numpy as np

from compare.generate.streams import Stream, below, raw, rows_of
from compare.generate.tokens import NOPE, ROPE, Tokens, whole_tokens
from compare.generate.v4_batch import WIDTH
from compare.suites.v4_prefill.case import EXACT_TOKENS, V4PrefillCase

SETS = 4
PAIRS = 32
_MARK = 8


def exact_tokens(words: np.ndarray, scale_words: np.ndarray, marks: np.ndarray) -> Tokens:
    """The keys of raw words [N, 512] and [N, 7]; marks bool [N, 64]: outside which sets each is."""
    numbers = below(words, 17) - 8
    numbers[:, 1 : 2 * PAIRS : 2] = numbers[:, 0 : 2 * PAIRS : 2]
    return whole_tokens(numbers[:, :NOPE], _MARK * marks, scale_words)


def exact_marks(
    case: V4PrefillCase, lists: np.ndarray | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each request bool [gathered positions, 64] and [compressed entries, 64]: outside which
    sets a key is; lists: topk_indices. Column SETS * token + set, token counted in the request.
    """
    assert ROPE == SETS * EXACT_TOKENS
    found, first = [], 0
    for request, (length, queries) in enumerate(zip(case.seq, case.q, strict=True)):
        gathered = case.batch.gathered(request)
        window = np.zeros((gathered, ROPE), bool)
        entries = np.zeros((case.batch.compressed(request), ROPE), bool)
        for token in range(queries):
            position = length - queries + token
            start, end = case.batch.seen(request, position)
            listed = np.zeros(0, np.int64)
            if lists is not None:
                row = lists[first + token]
                listed = row[row >= 0].astype(np.int64)
            outside = _outside(case, first + token, len(listed) + end - start)
            columns = slice(SETS * token, SETS * (token + 1))
            entries[listed, columns] = outside[: len(listed)]
            base = length - gathered
            window[start - base : end - base, columns] = outside[len(listed) :]
        found.append((window, entries))
        first += queries
    return found


def _outside(case: V4PrefillCase, token: int, count: int) -> np.ndarray:
    """bool [count, SETS] of the keys in a token's list, in its order."""
    most = count.bit_length() - 1
    place = np.arange(count)
    outside = np.ones((count, SETS), bool)
    outside[:, 0] = place >= 1 << most
    outside[:, 1] = place < count - (1 << most)
    longest = -(-(case.slots + 1) // 4) * 4
    words = raw(case.seed, Stream.V4_SET, token * 2 * longest, (2, longest))
    for drawn in range(2):
        size = 1 << int(below(words[drawn, -1:], most + 1)[0])
        order = np.argsort(words[drawn, :count], kind="stable")
        outside[order[:size], 2 + drawn] = False
    return outside


def exact_q(case: V4PrefillCase, start: int, end: int) -> np.ndarray:
    """float32 [end - start, H, 512]; head h of token t goes by set (h + t) mod SETS."""
    words = rows_of(case.seed, Stream.V4_Q, start, end, case.h * PAIRS)
    half = (below(words, 9) - 4).reshape(end - start, case.h, PAIRS)
    q = np.zeros((end - start, case.h, WIDTH), np.float32)
    q[..., 0 : 2 * PAIRS : 2] = half
    q[..., 1 : 2 * PAIRS : 2] = -half
    strength = 2.0 ** np.ceil(np.log2(1000 / (_MARK * case.scale)))
    own = np.concatenate([np.arange(queries) for queries in case.q] or [np.zeros(0, np.int64)])
    token = np.arange(start, end)
    heads = np.arange(case.h)
    column = NOPE + SETS * own[token, None] + (token[:, None] + heads) % SETS
    q[np.arange(end - start)[:, None], heads, column] = -strength
    return q
