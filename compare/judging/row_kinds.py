"""Which rows must hold a special value: arithmetic on the inputs, without any attention.

A row is empty because no slot of it is valid, never because an lse says so.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64

from compare.cases.inputs import SparsePrefillInputs
from compare.judging.metrics import to_float64
from compare.judging.tolerance import LOG2E, RowFacts

_BLOCK = 1 << 20
_LOWEST_RUNNING_MAX = 1e30
"""FlashMLA's running maximum starts at -1e30 in base 2: beyond that size a score isn't defined."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowKinds:
    """What the contract asks of the rows of n tokens.

    empty [n]: no valid slot: out exactly 0, lse +inf, max_logits -inf. nan_score [n, H]: NaN in q
    or in a referenced key: out and lse NaN, max_logits not compared. nan_out, zero_out [n, H]: out
    is NaN (nan_score, or the sink is NaN) or exactly 0 (empty, or the sink is +inf). undefined
    [n, H]: an infinity in q or in a referenced key, or scores past 1e30: not compared.
    All other values are finite.
    """

    empty: Bool[np.ndarray, " n"]
    nan_score: Bool[np.ndarray, "n H"]
    nan_out: Bool[np.ndarray, "n H"]
    zero_out: Bool[np.ndarray, "n H"]
    undefined: Bool[np.ndarray, "n H"]
    facts: RowFacts

    @property
    def ordinary(self) -> bool:
        """No special value is due anywhere in these rows."""
        special = (self.empty, self.nan_out, self.zero_out, self.undefined)
        return not any(mask.any() for mask in special)


class KeyFacts:
    """Norms and special values of all kv rows, found once; `rows` then classifies any tokens."""

    def __init__(self, inputs: SparsePrefillInputs) -> None:
        self._inputs = inputs
        S, D = inputs.kv.shape
        self._norm = np.zeros(S)
        self._nan = np.zeros(S, bool)
        self._inf = np.zeros(S, bool)
        step = max(1, _BLOCK // D)
        for at in range(0, S, step):
            block = slice(at, at + step)
            self._norm[block], self._nan[block], self._inf[block] = _norms(inputs.kv[block])

    def valid(self, tokens: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, "n K"]:
        """0 <= index < S and slot < topk_length: the one rule of validity (spec 1.2)."""
        inputs = self._inputs
        indices = inputs.indices[tokens]
        valid = (indices >= 0) & (indices < len(inputs.kv))
        if inputs.topk_length is not None:
            valid &= np.arange(indices.shape[1]) < inputs.topk_length[tokens][:, None]
        return valid

    def rows(self, tokens: Int64[np.ndarray, " n"]) -> RowKinds:
        """The kinds of all rows of these tokens."""
        inputs = self._inputs
        valid = self.valid(tokens)
        indices = np.where(valid, inputs.indices[tokens], -1)
        empty = ~valid.any(axis=1)
        q_norm, q_nan, q_inf = _norms(inputs.q[tokens])
        if len(inputs.kv):
            named = np.where(valid, indices, 0)
            key_nan = (valid & self._nan[named]).any(axis=1)
            key_inf = (valid & self._inf[named]).any(axis=1)
            longest = np.where(valid, self._norm[named], 0.0).max(axis=1, initial=0.0)
        else:
            key_nan = key_inf = np.zeros(len(tokens), bool)
            longest = np.zeros(len(tokens))
        filled = ~empty[:, None]
        reach = abs(inputs.sm_scale) * q_norm * longest[:, None]
        undefined = filled & ((q_inf | key_inf[:, None]) | (reach * LOG2E > _LOWEST_RUNNING_MAX))
        nan_score = filled & (q_nan | key_nan[:, None]) & ~undefined
        sink = np.full(inputs.q.shape[1], -np.inf)
        if inputs.attn_sink is not None:
            sink = inputs.attn_sink.astype(np.float64)
        nan_out = nan_score | (filled & np.isnan(sink) & ~undefined)
        zero_out = (~filled | (sink == np.inf)) & ~nan_out & ~undefined
        return RowKinds(
            empty=empty,
            nan_score=nan_score,
            nan_out=nan_out,
            zero_out=zero_out,
            undefined=undefined,
            facts=RowFacts(
                count=valid.sum(axis=1),
                copies=most_copies(indices),
                longest=longest,
                reach=reach,
                d_qk=inputs.q.shape[2],
            ),
        )


def most_copies(indices: Int[np.ndarray, "n K"]) -> Int64[np.ndarray, " n"]:
    """How often the most frequent non-negative value of each row occurs; 0 where there is none."""
    if indices.shape[1] == 0:
        return np.zeros(len(indices), np.int64)
    ranked = np.sort(indices, axis=1)
    place = np.arange(ranked.shape[1])
    starts = np.ones(ranked.shape, bool)
    starts[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    return np.where(ranked >= 0, place - first + 1, 0).max(axis=1)


def _norms(
    block: np.ndarray,
) -> tuple[Float64[np.ndarray, "..."], Bool[np.ndarray, "..."], Bool[np.ndarray, "..."]]:
    """Norm over the last axis of what is finite, and whether a NaN or an infinity stands there."""
    values = to_float64(block)
    square = np.einsum("...d,...d->...", values, values)
    if np.isfinite(square).all():
        none = np.zeros(square.shape, bool)
        return np.sqrt(square), none, none
    finite = np.isfinite(values)
    kept = np.where(finite, values, 0.0)
    norm = np.sqrt(np.einsum("...d,...d->...", kept, kept))
    return norm, np.isnan(values).any(axis=-1), np.isinf(values).any(axis=-1)
