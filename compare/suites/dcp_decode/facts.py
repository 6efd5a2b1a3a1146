"""Which rows of a decode must hold a special value: arithmetic on the inputs, no attention.

A row is empty because its bound leaves it no key on this rank, or because it is padding, never
because an lse says so.
"""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import torch
from jaxtyping import Bool, Int64, Num, Shaped
from torch import Tensor

from compare.generate.ownership import local_length
from compare.judging.device import block_elements, to_numpy, upload
from compare.judging.row_kinds import LARGEST_SCORE, RowKinds, norms
from compare.judging.tolerance import LOG2E, RowFacts
from compare.suites.dcp_decode.call import DcpDecodeInputs


class DecodeFacts:
    """What the inputs say about each row of one call, found once; `rows` then classifies any.

    request, keys [T]: whose keys a row sees, and how many of them: the first n. -1 and 0 for
    padded rows.
    """

    def __init__(
        self,
        inputs: DcpDecodeInputs,
        q: Num[Tensor, "T H D"],
        kv_cache: Num[Tensor, "N P D"],
        device: str | None = None,
    ) -> None:
        """q, kv_cache: those of the inputs, on the device."""
        self._inputs = inputs
        self.device, self.q, self.kv = device, q, kv_cache
        self.request, self.keys = visible_keys(inputs)
        T = len(self.keys)
        self._longest = np.zeros(T)
        self._nan, self._inf, self._unclear = (np.zeros(T, bool) for _ in range(3))
        self._copies = np.zeros(T, np.int64)
        self._look_at_keys()

    @property
    def empty(self) -> Bool[np.ndarray, " T"]:
        return self.keys == 0

    def rows(self, tokens: Int64[np.ndarray, " n"]) -> RowKinds:
        """The kinds of all rows of these tokens."""
        at = torch.from_numpy(tokens).to(self.q.device)
        q_norm, q_nan, q_inf = map(to_numpy, norms(self.q[at]))
        empty, longest = self.empty[tokens], self._longest[tokens]
        filled = ~empty[:, None]
        scale = 1.0 if self._inputs.q_scale is None else float(self._inputs.q_scale)
        reach = abs(self._inputs.sm_scale) * scale * q_norm * longest[:, None]
        outside = q_inf | self._inf[tokens, None] | (reach * LOG2E > LARGEST_SCORE)
        undefined = (filled & outside) | self._unclear[tokens, None]
        nan = filled & (q_nan | self._nan[tokens, None]) & ~undefined
        return RowKinds(
            empty=empty,
            nan_score=nan,
            nan_out=nan,
            zero_out=~filled & ~undefined,
            undefined=undefined,
            facts=RowFacts(
                count=self.keys[tokens],
                copies=self._copies[tokens],
                longest=longest,
                reach=reach,
                d_qk=self._inputs.q.shape[2],
            ),
        )

    def _look_at_keys(self) -> None:
        """Of each row its longest key, and whether a NaN or an infinity lies among its keys, or
        behind them within its request (where the contract says nothing).
        """
        inputs, P = self._inputs, self._inputs.kv_cache.shape[1]
        scale = 1.0 if inputs.kv_scale is None else float(inputs.kv_scale)
        step = max(1, block_elements(self.device) // inputs.kv_cache.shape[2])
        slots = self.kv.flatten(0, 1)
        if len(slots) == 0:
            return
        columns = zip(*map(norms, slots.split(step)), strict=True)
        norm, nan, inf = (to_numpy(torch.cat(column)) for column in columns)
        for b, (start, end) in enumerate(pairwise(inputs.query_start_loc.tolist())):
            length = int(inputs.seq_lens[b])
            if start == end or length == 0:
                continue
            pages = inputs.block_table[b, : -(-length // P)].astype(np.int64)
            at = (pages[:, None] * P + np.arange(P)).ravel()[:length]
            tokens = np.arange(start, end)
            seen = self.keys[tokens]
            longest = np.concatenate([[0.0], np.maximum.accumulate(norm[at])]) * scale
            self._longest[tokens] = longest[seen]
            self._nan[tokens] = seen > _first(nan[at])
            self._inf[tokens] = seen > _first(inf[at])
            last_special = length - _first((nan | inf)[at][::-1])
            self._unclear[tokens] = seen < last_special
            self._copies[tokens] = np.unique(pages, return_counts=True)[1].max()


def visible_keys(
    inputs: DcpDecodeInputs,
) -> tuple[Int64[np.ndarray, " T"], Int64[np.ndarray, " T"]]:
    """Of each row of q the request whose keys it sees, and how many: the first n of this rank's.

    A row's bound is its request's total length less the tokens after it, and n is what the rank
    owns below that, at most its keys. -1 and 0 for padding.
    """
    request = np.full(len(inputs.q), -1, np.int64)
    keys = np.zeros(len(inputs.q), np.int64)
    for b, (start, end) in enumerate(pairwise(inputs.query_start_loc.tolist())):
        request[start:end] = b
        for t in range(start, end):
            bound = int(inputs.total_lens[b]) - (end - 1 - t if inputs.causal else 0)
            below = local_length(bound, inputs.dcp_rank, inputs.dcp_world, inputs.interleave)
            keys[t] = min(int(inputs.seq_lens[b]), below)
    return request, keys


def stored(array: Shaped[np.ndarray, "..."], device: str | None) -> Num[Tensor, "..."]:
    """An array on the device in its own dtype, float8 too."""
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return upload(array.view(np.uint8), device).view(torch.float8_e4m3fn)
    return upload(array, device)


def _first(flags: Bool[np.ndarray, " n"]) -> int:
    """The place of the first True; n where there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)
