"""Known deviations from the contract of sparse prefill, as the float64 oracle can compute them.

Each field is one fault that real kernels and adapters have had. A fault is a change of the inputs
before the right formula, or of the outputs after it; only the choice of value columns lies inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from torch_ref.prefill.inputs import VALUE_WIDTH, PrefillInputs


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One deviation, or several; the default is the contract.

    sink          omitted; counted in lse as well (lse = ln(sum exp z + exp sink)); or multiplied
                  by sm_scale as if it were a score
    lse_base2     lse in base 2: lse / ln 2
    max_logits    unscaled: max_j of q.k itself, taken before the product with sm_scale
    scale_power   2 applies sm_scale twice
    index         minus_one_wraps: an index in -S..-1 counts from the end of kv, as NumPy has it
    length        ignored, or one slot too long or too short; without lengths nothing changes
    v_offset      V starts at this column of kv and wraps around at its width: 64 gives columns
                  [64, 576) at D = 576 and a rotation by 64 columns at D = 512
    head_shift    head h's results appear at head (h + shift) mod H, in every output
    empty_lse     the lse of a row without a valid slot
    """

    sink: Literal["right", "omitted", "in_lse", "times_scale"] = "right"
    lse_base2: bool = False
    max_logits: Literal["right", "unscaled"] = "right"
    scale_power: Literal[1, 2] = 1
    index: Literal["right", "minus_one_wraps"] = "right"
    length: Literal["right", "ignored", "plus_one", "minus_one"] = "right"
    v_offset: int = 0
    head_shift: int = 0
    empty_lse: Literal["+inf", "-inf"] = "+inf"

    @property
    def needs_raw_max(self) -> bool:
        return self.max_logits == "unscaled"

    def change_inputs(self, inputs: PrefillInputs) -> PrefillInputs:
        """The inputs that the right formula must see to give this deviation."""
        return replace(
            inputs,
            sm_scale=inputs.sm_scale**self.scale_power,
            attn_sink=self._sink(inputs),
            indices=self._indices(inputs),
            topk_length=self._length(inputs),
        )

    def values(self, keys: Tensor) -> Tensor:
        """V [t, K, 512], the value columns of the gathered keys [t, K, D]."""
        if self.v_offset:
            keys = keys.roll(-self.v_offset, dims=-1)
        return keys[..., :VALUE_WIDTH]

    def change_outputs(
        self,
        inputs: PrefillInputs,
        out: Tensor,
        raw_max: Tensor,
        max_logits: Tensor,
        lse: Tensor,
        p2: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out, max_logits, lse and p2 with this deviation, from what the formula gave."""
        empty = lse == math.inf
        if self.sink == "in_lse" and inputs.attn_sink is not None:
            lse = torch.logaddexp(lse, inputs.attn_sink.double())
        if self.lse_base2:
            lse = lse / math.log(2.0)
        if self.max_logits == "unscaled":
            max_logits = raw_max
        lse = lse.masked_fill(empty, math.inf if self.empty_lse == "+inf" else -math.inf)
        if self.head_shift:
            out, max_logits, lse, p2 = (
                tensor.roll(self.head_shift, dims=1) for tensor in (out, max_logits, lse, p2)
            )
        return out, max_logits, lse, p2

    def _sink(self, inputs: PrefillInputs) -> Tensor | None:
        if inputs.attn_sink is None or self.sink == "omitted":
            return None
        if self.sink == "times_scale":
            return inputs.attn_sink * inputs.sm_scale
        return inputs.attn_sink

    def _indices(self, inputs: PrefillInputs) -> Tensor:
        if self.index == "right":
            return inputs.indices
        S = inputs.kv.shape[0]
        wraps = (inputs.indices < 0) & (inputs.indices >= -S)
        return torch.where(wraps, inputs.indices + S, inputs.indices)

    def _length(self, inputs: PrefillInputs) -> Tensor | None:
        if inputs.topk_length is None or self.length == "ignored":
            return None
        shift = {"right": 0, "plus_one": 1, "minus_one": -1}[self.length]
        return inputs.topk_length + shift


CONTRACT = Variant()
