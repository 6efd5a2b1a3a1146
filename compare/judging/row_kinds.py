"""Which rows must hold a special value: arithmetic on the inputs, without any attention.

A row is empty because no slot of it is valid, never because an lse says so.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from jaxtyping import BFloat16, Bool, Float64, Int, Int32, Int64, Num
from torch import Tensor

from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.device import block_elements, rows_at, to_numpy, upload
from compare.judging.tolerance import LOG2E, RowFacts

LARGEST_SCORE = 1e30
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

    def __init__(self, inputs: SparsePrefillInputs, device: str | None = None) -> None:
        self._inputs = inputs
        self._device = device
        self.kv: BFloat16[Tensor, "S D"] = upload(inputs.kv, device)
        """The keys, on the device."""
        step = max(1, block_elements(device) // inputs.kv.shape[1])
        # One row more stands for the keys of invalid slots.
        blocks = (*self.kv.split(step), self.kv.new_zeros(1, self.kv.shape[1]))
        columns = zip(*map(norms, blocks), strict=True)
        self._norm, self._nan, self._inf = map(torch.cat, columns)

    def valid(self, tokens: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, "n K"]:
        """0 <= index < S and slot < topk_length: the one rule of validity (FlashMLA's)."""
        return to_numpy(self._valid(tokens, upload(self._inputs.indices[tokens], self._device)))

    def _valid(
        self, tokens: Int64[np.ndarray, " n"], indices: Int32[Tensor, "n K"]
    ) -> Bool[Tensor, "n K"]:
        valid = (indices >= 0) & (indices < len(self._inputs.kv))
        if self._inputs.topk_length is not None:
            lengths = upload(self._inputs.topk_length[tokens], self._device)
            valid &= torch.arange(indices.shape[1], device=indices.device) < lengths[:, None]
        return valid

    def rows(
        self,
        tokens: Int64[np.ndarray, " n"],
        q: BFloat16[Tensor, "n H D"] | None = None,
        indices: Int32[Tensor, "n K"] | None = None,
    ) -> RowKinds:
        """The kinds of all rows of these tokens. q, indices: theirs, where they are on the device
        already.
        """
        inputs = self._inputs
        q = upload(rows_at(inputs.q, tokens), self._device) if q is None else q
        if indices is None:
            indices = upload(rows_at(inputs.indices, tokens), self._device)
        q_norm, q_nan, q_inf = map(to_numpy, norms(q))
        valid = self._valid(tokens, indices)
        named = torch.where(valid, indices, len(inputs.kv))
        count = to_numpy(valid.sum(dim=1))
        longest = np.zeros(len(tokens))
        key_nan = key_inf = np.zeros(len(tokens), bool)
        if named.shape[1]:
            longest = to_numpy(self._norm[named].amax(dim=1))
            key_nan, key_inf = (to_numpy(f[named].any(dim=1)) for f in (self._nan, self._inf))
        empty = count == 0
        filled = ~empty[:, None]
        reach = abs(inputs.sm_scale) * q_norm * longest[:, None]
        undefined = filled & ((q_inf | key_inf[:, None]) | (reach * LOG2E > LARGEST_SCORE))
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
                count=count,
                copies=to_numpy(most_copies(torch.where(valid, indices, -1))),
                longest=longest,
                reach=reach,
                d_qk=inputs.q.shape[2],
            ),
        )


def most_copies(indices: Int[Tensor, "n K"]) -> Int64[Tensor, " n"]:
    """How often the most frequent non-negative value of each row occurs; 0 where there is none."""
    if indices.shape[1] == 0:
        return indices.new_zeros(len(indices), dtype=torch.int64)
    # torch sorts on a CPU several times slower than NumPy, and orders positions along.
    ranked = (
        indices.sort(dim=1).values
        if indices.is_cuda
        else torch.from_numpy(np.sort(indices.numpy(), axis=1))
    )
    place = torch.arange(ranked.shape[1], device=ranked.device)
    starts = torch.ones_like(ranked, dtype=torch.bool)
    starts[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    first = torch.where(starts, place, 0).cummax(dim=1).values
    return torch.where(ranked >= 0, place - first + 1, 0).amax(dim=1)


def norms(
    block: Num[Tensor, "*rows D"],
) -> tuple[Float64[Tensor, "*rows"], Bool[Tensor, "*rows"], Bool[Tensor, "*rows"]]:
    """Norm over the last axis of what is finite, and whether a NaN or an infinity stands there."""
    values = block.double()
    norm = torch.linalg.vector_norm(values, dim=-1)
    if bool(torch.isfinite(norm).all()):
        none = torch.zeros_like(norm, dtype=torch.bool)
        return norm, none, none
    kept = torch.where(torch.isfinite(values), values, 0.0)
    norm = torch.linalg.vector_norm(kept, dim=-1)
    return norm, torch.isnan(values).any(dim=-1), torch.isinf(values).any(dim=-1)
