"""Known deviations from the contract of DCP decode, as the float64 oracle can compute them.

Each field is one fault that real kernels and adapters have had. A fault changes which keys a row
sees, the inputs before the right formula, or the outputs after it; only the choice of value
columns lies inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from torch_ref.decode.inputs import VALUE_WIDTH, DecodeInputs
from torch_ref.planning import BoundsShapeMismatch, DecodeRows, NonUniformBlock, decode_rows
from torch_ref.planning.sharding import local_length


@dataclass(frozen=True, kw_only=True)
class DecodeVariant:
    """One deviation, or several; the default is the contract.

    A row that is given the keys of a request without tokens, whose block table may hold anything,
    sees none where the table has no page of kv_cache for one.

    bound            total: every row sees all of its request; plus_one, minus_one: off by one;
                     after_localising: the local length reduced by the tokens after, which is also
                     what a kernel's own causal triangle does on a shard
    view             uniform: the batch viewed as [requests, rows / requests] as vLLM 0.33.0 does,
                     8 + 2 as 5 + 5; where the division doesn't come out nothing changes
    mask_interleave  the interleave that the mask supposes, the keys still lying as they do
    mask_rank        the rank that the mask supposes
    request_shift    a row uses block table and lengths of request (i + shift) mod B
    scale_power      2 applies sm_scale twice
    kv_scale         applied to keys only, to values only, or ignored; 1.0 changes nothing
    q_scale          ignored; 1.0 changes nothing
    v_offset         V starts at this column of the key and wraps around at its width: 64 gives
                     columns [64, 576)
    head_shift       head h's results appear at head (h + shift) mod H, in every output
    lse_base2        lse in base 2: lse / ln 2
    empty_lse        the lse of a row that sees no key, padded rows excepted
    lse_layout       reshaped: each request's lse [H, q] read as if it were [q, H]
    """

    bound: Literal["right", "total", "plus_one", "minus_one", "after_localising"] = "right"
    view: Literal["right", "uniform"] = "right"
    mask_interleave: int | None = None
    mask_rank: int | None = None
    request_shift: int = 0
    scale_power: Literal[1, 2] = 1
    kv_scale: Literal["right", "keys_only", "values_only", "ignored"] = "right"
    q_scale: Literal["right", "ignored"] = "right"
    v_offset: int = 0
    head_shift: int = 0
    lse_base2: bool = False
    empty_lse: Literal["-inf", "+inf", "0"] = "-inf"
    lse_layout: Literal["right", "reshaped"] = "right"

    @property
    def moves_rows(self) -> bool:
        """A row's result depends on other rows of its request."""
        return self.lse_layout == "reshaped"

    def change_inputs(self, inputs: DecodeInputs) -> DecodeInputs:
        """The inputs that the right formula must see to give this deviation."""
        for_keys = self.kv_scale in ("right", "keys_only")
        for_values = self.kv_scale in ("right", "values_only")
        return replace(
            inputs,
            sm_scale=inputs.sm_scale**self.scale_power,
            q_scale=inputs.q_scale if self.q_scale == "right" else 1.0,
            key_scale=inputs.key_scale if for_keys else 1.0,
            value_scale=inputs.value_scale if for_values else 1.0,
        )

    def visible(self, inputs: DecodeInputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each row the request whose keys it sees, and how many of them: the first n."""
        rows = self._rows(inputs)
        requests = len(inputs.total_lens)
        request = tuple((i + self.request_shift) % max(requests, 1) for i in rows.request)
        counts = [
            0
            if padding or not inputs.readable[j]
            else self._count(inputs, j, bound - inputs.total_lens[i])
            for i, j, bound, padding in zip(
                rows.request, request, rows.bound, rows.padding, strict=True
            )
        ]
        return request, tuple(counts)

    def values(self, keys: Tensor) -> Tensor:
        """V [n, 512], the value columns of the keys [n, 576]."""
        if self.v_offset:
            keys = keys.roll(-self.v_offset, dims=-1)
        return keys[..., :VALUE_WIDTH]

    def change_outputs(
        self, inputs: DecodeInputs, empty: Tensor, out: Tensor, lse: Tensor, p2: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and p2 with this deviation; `empty` [R, 1] are rows without a key, unpadded."""
        if self.lse_base2:
            lse = lse / math.log(2.0)
        if self.empty_lse != "-inf":
            lse = lse.masked_fill(empty, {"+inf": math.inf, "0": 0.0}[self.empty_lse])
        if self.lse_layout == "reshaped":
            lse = lse.clone()
            for start, end in pairwise(inputs.query_start_loc):
                lse[start:end] = lse[start:end].mT.clone().reshape(end - start, lse.shape[1])
        if self.head_shift:
            out, lse, p2 = (
                torch.roll(tensor, self.head_shift, dims=1) for tensor in (out, lse, p2)
            )
        return out, lse, p2

    def _rows(self, inputs: DecodeInputs) -> DecodeRows:
        if self.view == "right":
            return inputs.rows
        try:
            return decode_rows(
                inputs.query_start_loc,
                inputs.total_lens,
                max_query_len=max((1, *inputs.query_lens)),
                causal=inputs.causal,
                num_rows=inputs.tokens,
                rules="vllm-0.33.0",
            )
        except (BoundsShapeMismatch, NonUniformBlock):
            return inputs.rows

    def _count(self, inputs: DecodeInputs, request: int, below_total: int) -> int:
        """Local keys of `request` that a row sees whose bound lies `below_total` (<= 0) from T."""
        length, total = inputs.seq_lens[request], inputs.total_lens[request]
        if self.bound == "after_localising":
            return max(length + below_total, 0)
        shift = {"plus_one": 1, "minus_one": -1}.get(self.bound, 0)
        bound = total if self.bound == "total" else total + below_total + shift
        rank = inputs.dcp_rank if self.mask_rank is None else self.mask_rank
        interleave = self.mask_interleave or inputs.interleave
        return min(length, local_length(bound, rank, inputs.dcp_world, interleave))


CONTRACT = DecodeVariant()
