"""Which (token, head) rows of `out` a recorded result keeps."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt64

from compare.cases.inputs import SparsePrefillInputs

MOST_ROWS = 96
FEWEST_ROWS = 32
# One of sixty cases' share of 6 MB; `out` has what max_logits and lse of every row leave of it.
CASE_BYTES = 6_000_000 // 60
_ROW_BYTES = 512 * 2
_STATISTICS_BYTES = 2 * 4
_STREAM = 0x726F7773  # a Philox key of its own, apart from the inputs' streams


def row_budget(total: int) -> int:
    """How many of `total` (token, head) rows are kept: 96 where the case is small, 32 at least."""
    room = (CASE_BYTES - total * _STATISTICS_BYTES) // _ROW_BYTES
    return min(total, max(FEWEST_ROWS, min(MOST_ROWS, room)))


def special_rows(
    inputs: SparsePrefillInputs, lse: Float32[np.ndarray, "T H"]
) -> dict[str, Bool[np.ndarray, "T H"]]:
    """The rows where special values are at stake, by kind; a row may be of several kinds.

    Kinds: no valid slot; an lse that isn't finite; a head whose sink is -inf, +inf, NaN, the
    smallest or the largest finite one.
    """
    shape = lse.shape
    valid = (inputs.indices >= 0) & (inputs.indices < len(inputs.kv))
    if inputs.topk_length is not None:
        valid &= np.arange(inputs.indices.shape[1]) < inputs.topk_length[:, None]
    kinds = {
        "empty": np.broadcast_to(~valid.any(1)[:, None], shape),
        "lse not finite": ~np.isfinite(lse),
    }
    sink = inputs.attn_sink
    if sink is not None:
        heads = {"sink -inf": sink == -np.inf, "sink +inf": sink == np.inf}
        heads["sink NaN"] = np.isnan(sink)
        finite = np.flatnonzero(np.isfinite(sink))
        if len(finite):
            order = finite[np.argsort(sink[finite], kind="stable")]
            heads["sink smallest"] = np.arange(len(sink)) == order[0]
            heads["sink largest"] = np.arange(len(sink)) == order[-1]
        kinds |= {kind: np.broadcast_to(of, shape) for kind, of in heads.items()}
    return {kind: rows for kind, rows in kinds.items() if rows.any()}


def choose_rows(
    inputs: SparsePrefillInputs,
    lse: Float32[np.ndarray, "T H"],
    seed: int,
    budget: int | None = None,
) -> tuple[Int32[np.ndarray, " R"], int]:
    """The rows of `out` that are kept, ascending (token * H + head), and how many of them are
    special.

    Every special row is kept, and ordinary rows by the seed fill up to `budget` (None: row_budget).
    Where there are more special rows than that, each kind in turn, the ordinary rows being one,
    gives its next row by the seed. Integer arithmetic only: the same rows on every machine.
    """
    total = lse.size
    budget = row_budget(total) if budget is None else min(total, budget)
    order = np.argsort(_philox(seed, total), kind="stable")
    kinds = [rows.reshape(-1) for rows in special_rows(inputs, lse).values()]
    special = np.logical_or.reduce(kinds) if kinds else np.zeros(total, bool)
    if special.sum() <= budget:
        chosen = np.concatenate([order[special[order]], order[~special[order]]])[:budget]
    else:
        queues = [list(order[of[order]]) for of in [*kinds, ~special]]
        chosen = np.fromiter(_in_turn(queues, budget), np.int64, budget)
    chosen = np.sort(chosen)
    return chosen.astype(np.int32), int(special[chosen].sum())


def _in_turn(queues: list[list[int]], count: int):
    """The first `count` distinct elements, one from each queue in turn."""
    taken: set[int] = set()
    positions = [0] * len(queues)
    while True:
        for k, queue in enumerate(queues):
            while positions[k] < len(queue) and queue[positions[k]] in taken:
                positions[k] += 1
            if positions[k] < len(queue):
                taken.add(queue[positions[k]])
                yield queue[positions[k]]
                if len(taken) == count:
                    return


def _philox(seed: int, count: int) -> UInt64[np.ndarray, " count"]:
    return np.random.Philox(key=np.array([seed, _STREAM], np.uint64)).random_raw(count)
