"""Which (token, head) rows of `out` a recorded result keeps."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt64

from compare.generate.ownership import local_length
from compare.judging.attention_call import SparsePrefillInputs
from compare.suites.dcp_decode.call import DcpDecodeInputs
from compare.suites.v4_prefill.call import V4PrefillInputs

_ROW_BYTES = 512 * 2
_STREAM = 0x726F7773  # a Philox key of its own, apart from the inputs' streams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What a case may take. most, fewest: rows of `out`. bytes: of the case, what the statistics of
    every row leave of which is for `out`. statistics: bytes of a row's.
    """

    most: int
    fewest: int
    bytes: int
    statistics: int


SHARES = {
    # One of sixty cases of 6 MB; max_logits and lse.
    SparsePrefillInputs: Share(most=96, fewest=32, bytes=6_000_000 // 60, statistics=2 * 4),
    # One of fifty cases of 2 MB, and there are two kernels; lse alone.
    DcpDecodeInputs: Share(most=36, fewest=24, bytes=2_000_000 // 50, statistics=4),
    # One of fifty cases of 500 KB, and there are two kernels; max_logits and lse.
    V4PrefillInputs: Share(most=24, fewest=8, bytes=500_000 // 50, statistics=2 * 4),
}
RowInputs = SparsePrefillInputs | DcpDecodeInputs | V4PrefillInputs


def row_budget(total: int, share: Share) -> int:
    """How many of `total` (token, head) rows are kept."""
    room = (share.bytes - total * share.statistics) // _ROW_BYTES
    return min(total, max(share.fewest, min(share.most, room)))


def special_rows(
    inputs: RowInputs, lse: Float32[np.ndarray, "T H"]
) -> dict[str, Bool[np.ndarray, "T H"]]:
    """The rows where special values are at stake, by kind; a row may be of several kinds.

    Kinds of sparse prefill: no valid slot; an lse that isn't finite; a head whose sink is -inf,
    +inf, NaN, the smallest or the largest finite one. Of V4 prefill the same, where every row has
    a key, and the first and the last token of each request. Of decode: padding; no visible key; an
    lse of another row that isn't finite.
    """
    if isinstance(inputs, DcpDecodeInputs):
        kinds = _decode_rows(inputs, lse)
    elif isinstance(inputs, V4PrefillInputs):
        kinds = _v4_rows(inputs, lse)
    else:
        kinds = _prefill_rows(inputs, lse)
    return {kind: rows for kind, rows in kinds.items() if rows.any()}


def _decode_rows(
    inputs: DcpDecodeInputs, lse: Float32[np.ndarray, "T H"]
) -> dict[str, Bool[np.ndarray, "T H"]]:
    tokens = np.arange(len(lse))
    starts = inputs.query_start_loc.astype(np.int64)
    padding = tokens >= starts[-1]
    request = np.minimum(np.searchsorted(starts, tokens, side="right") - 1, len(starts) - 2)
    empty = padding.copy()
    for token in np.flatnonzero(~padding):
        later = starts[request[token] + 1] - 1 - token if inputs.causal else 0
        bound = int(inputs.total_lens[request[token]] - later)
        own = (inputs.dcp_rank, inputs.dcp_world, inputs.interleave)
        empty[token] = local_length(max(0, bound), *own) == 0
    kinds = {
        "padding": np.broadcast_to(padding[:, None], lse.shape),
        "no key": np.broadcast_to((empty & ~padding)[:, None], lse.shape),
    }
    return kinds | {"lse not finite": ~np.isfinite(lse) & ~empty[:, None]}


def _prefill_rows(
    inputs: SparsePrefillInputs, lse: Float32[np.ndarray, "T H"]
) -> dict[str, Bool[np.ndarray, "T H"]]:
    shape = lse.shape
    valid = (inputs.indices >= 0) & (inputs.indices < len(inputs.kv))
    if inputs.topk_length is not None:
        valid &= np.arange(inputs.indices.shape[1]) < inputs.topk_length[:, None]
    return {
        "empty": np.broadcast_to(~valid.any(1)[:, None], shape),
        "lse not finite": ~np.isfinite(lse),
        **_sink_rows(inputs.attn_sink, shape),
    }


def _v4_rows(
    inputs: V4PrefillInputs, lse: Float32[np.ndarray, "T H"]
) -> dict[str, Bool[np.ndarray, "T H"]]:
    starts = inputs.query_start_loc - inputs.query_start_loc[0]
    tokens = np.arange(len(lse))
    ends = {"first token": starts[:-1], "last token": starts[1:] - 1}
    some = np.diff(starts) > 0
    return {
        "lse not finite": ~np.isfinite(lse),
        **_sink_rows(inputs.attn_sink, lse.shape),
        **{
            kind: np.broadcast_to(np.isin(tokens, of[some])[:, None], lse.shape)
            for kind, of in ends.items()
        },
    }


def _sink_rows(
    sink: Float32[np.ndarray, " H"] | None, shape: tuple[int, ...]
) -> dict[str, Bool[np.ndarray, "T H"]]:
    if sink is None:
        return {}
    heads = {"sink -inf": sink == -np.inf, "sink +inf": sink == np.inf}
    heads["sink NaN"] = np.isnan(sink)
    finite = np.flatnonzero(np.isfinite(sink))
    if len(finite):
        order = finite[np.argsort(sink[finite], kind="stable")]
        heads["sink smallest"] = np.arange(len(sink)) == order[0]
        heads["sink largest"] = np.arange(len(sink)) == order[-1]
    return {kind: np.broadcast_to(of, shape) for kind, of in heads.items()}


def choose_rows(
    inputs: RowInputs,
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
    if budget is None:
        budget = row_budget(total, SHARES[type(inputs)])
    budget = min(total, budget)
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
