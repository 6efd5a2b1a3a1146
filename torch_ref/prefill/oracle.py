"""Sparse prefill in plain PyTorch: the float64 oracle, and the eager run of the kernel's recipe.

Both compute the contract of FlashMLA's `flash_mla_sparse_fwd`. With z the scaled scores of one
token and head over its valid slots:

    m   = max_j z_j              L = sum_j exp(z_j - m)         lse = m + ln L
    out = sum_j exp(z_j - m) V_j / (L + exp(sink - m))          V = the first 512 columns of kv

The sink changes `out` only. A row without a valid slot has out 0, max_logits -inf and lse +inf,
whatever q and the sink are. A NaN in q or in a referenced key makes out and lse of that
(token, head) NaN; max_logits is then the maximum of the other scores and not to be compared.
Duplicated indices count as often as they occur.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Float32, Float64, Int32
from torch import Tensor

from torch_ref.arguments import token_rows
from torch_ref.arithmetic import LN2, LOG2E, full_fp32_products, max_without_nan
from torch_ref.prefill.inputs import (
    VALUE_WIDTH,
    Block,
    PrefillInputs,
    blocks,
    check_inputs,
)
from torch_ref.prefill.variants import CONTRACT, Variant


@dataclass(frozen=True, eq=False)
class OracleResult:
    """What sparse prefill is in float64, and how large rounding P alone can make an error.

    out [R, H, 512]; max_logits and lse [R, H] in natural-log units; p2 [R, H] is
    sqrt(sum_j p_j^2 |V_j|^2) with p the weights that multiply V, the sink's share taken off.
    """

    out: Float64[Tensor, "R H Dv"]
    max_logits: Float64[Tensor, "R H"]
    lse: Float64[Tensor, "R H"]
    p2: Float64[Tensor, "R H"]


@dataclass(frozen=True, eq=False)
class SparsePrefillResult:
    """What a kernel returns: out bf16 [R, H, 512], max_logits and lse fp32 [R, H] (natural log)."""

    out: BFloat16[Tensor, "R H Dv"]
    max_logits: Float32[Tensor, "R H"]
    lse: Float32[Tensor, "R H"]


def sparse_prefill_oracle(
    q: BFloat16[Tensor, "T H D"],
    kv: BFloat16[Tensor, "S D"] | BFloat16[Tensor, "S 1 D"],
    indices: Int32[Tensor, "T K"] | Int32[Tensor, "T 1 K"],
    sm_scale: float,
    *,
    d_v: int = VALUE_WIDTH,
    attn_sink: Float32[Tensor, " H"] | None = None,
    topk_length: Int32[Tensor, " T"] | None = None,
    rows: Sequence[int] | Tensor | None = None,
    device: torch.device | str | None = None,
    variant: Variant = CONTRACT,
) -> OracleResult:
    """Computes sparse prefill in float64.

    q bf16 [T, H, D], H in 1..128, D 512 or 576; kv bf16 [S, D] or [S, 1, D]; indices int32 [T, K]
    or [T, 1, K], a slot outside 0..S-1 is invalid; sm_scale any finite number, negative and 0
    included; attn_sink fp32 [H] in natural-log units, not scaled; topk_length int32 [T], slots at
    or past it are invalid. Special values: the module's docstring.

    rows computes only these tokens, R of them and in this order (all of them for None). device
    says where to compute; the result stays there. variant asks for a known deviation instead of
    the contract. Finite inputs are assumed apart from NaN: an infinite key is outside the contract.

    ValueError names the argument that doesn't fit, what it was and what is accepted.
    """
    inputs = check_inputs(
        q, kv, indices, sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length
    ).on(device)
    chosen = token_rows(rows, inputs.tokens, inputs.q.device)
    changed = variant.change_inputs(inputs)
    R, H = len(chosen), changed.heads
    out = changed.q.new_empty(R, H, VALUE_WIDTH, dtype=torch.float64)
    raw_max, max_logits, lse, p2 = out.new_empty(4, R, H)
    for block in blocks(changed, chosen, torch.float64):
        at = block.where
        out[at], raw_max[at], max_logits[at], lse[at], p2[at] = _attend(changed, block, variant)
    return OracleResult(
        *variant.change_outputs(inputs, out, raw_max, max_logits, lse, p2),
    )


def _attend(
    inputs: PrefillInputs, block: Block, variant: Variant
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The formula for one block: out, the maximum of q.k before scaling, max_logits, lse, p2."""
    valid, values = block.valid, variant.values(block.keys)  # t 1 K, t K Dv
    scores = block.q @ block.keys.mT  # t H K
    z = (scores * inputs.sm_scale).masked_fill(~valid, -math.inf)
    m = max_without_nan(z)  # t H
    empty = ~valid.any(-1)  # t 1
    # -inf - (-inf) would be NaN: where no score is left, any finite reference serves.
    reference = m.masked_fill(m == -math.inf, 0.0)
    p = torch.exp(z - reference[..., None])  # t H K
    L = p.sum(-1)  # t H
    weight = L
    if inputs.attn_sink is not None:
        weight = L + torch.exp(inputs.attn_sink.double() - reference)
    out = (p @ values) / weight[..., None]  # t H Dv
    norms = torch.linalg.vector_norm(values, dim=-1)  # t K
    spread = torch.sqrt(p.square() @ norms.square()[..., None])[..., 0]  # t H
    return (
        out.masked_fill(empty[..., None], 0.0),
        max_without_nan(scores.masked_fill(~valid, -math.inf)) if variant.needs_raw_max else m,
        m,
        (reference + torch.log(L)).masked_fill(empty, math.inf),
        (spread / weight).masked_fill(empty, 0.0),
    )


def sparse_prefill(
    q: BFloat16[Tensor, "T H D"],
    kv: BFloat16[Tensor, "S D"] | BFloat16[Tensor, "S 1 D"],
    indices: Int32[Tensor, "T K"] | Int32[Tensor, "T 1 K"],
    sm_scale: float,
    *,
    d_v: int = VALUE_WIDTH,
    attn_sink: Float32[Tensor, " H"] | None = None,
    topk_length: Int32[Tensor, " T"] | None = None,
    rows: Sequence[int] | Tensor | None = None,
    device: torch.device | str | None = None,
) -> SparsePrefillResult:
    """Computes sparse prefill eagerly, in the precision recipe of FlashMLA's SM90 kernel.

    Scores are fp32 and go to base 2 with one factor sm_scale * log2(e); P = exp2(s - max) is
    rounded to bf16 for P V, whose sum is fp32; L sums the unrounded P in fp32; the sink joins L in
    the epilogue; out is rounded to bf16 once. Each row has one reference maximum, where a kernel
    that walks in blocks has several: that moves the rounding of P, not its size.

    Arguments, special values and errors are those of `sparse_prefill_oracle`.
    """
    inputs = check_inputs(
        q, kv, indices, sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length
    ).on(device)
    chosen = token_rows(rows, inputs.tokens, inputs.q.device)
    out = inputs.q.new_empty(len(chosen), inputs.heads, VALUE_WIDTH)
    max_logits, lse = out.new_empty(2, len(chosen), inputs.heads, dtype=torch.float32)
    with full_fp32_products():
        for block in blocks(inputs, chosen, torch.float32):
            at = block.where
            out[at], max_logits[at], lse[at] = _attend_fp32(inputs, block)
    return SparsePrefillResult(out, max_logits, lse)


def _attend_fp32(inputs: PrefillInputs, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    valid, values = block.valid, block.keys[..., :VALUE_WIDTH]
    s2 = (block.q @ block.keys.mT) * (inputs.sm_scale * LOG2E)  # t H K
    s2 = s2.masked_fill_(~valid, -math.inf)
    m2 = max_without_nan(s2)  # t H
    empty = ~valid.any(-1)  # t 1
    reference = m2.masked_fill(m2 == -math.inf, 0.0)
    p = torch.exp2(s2 - reference[..., None])  # t H K
    L = p.sum(-1)  # t H
    weight = L
    if inputs.attn_sink is not None:
        weight = L + torch.exp2(inputs.attn_sink * LOG2E - reference)
    out = (p.bfloat16().float() @ values) * (1.0 / weight)[..., None]  # t H Dv
    return (
        out.masked_fill(empty[..., None], 0.0).bfloat16(),
        m2 * LN2,
        (torch.log(L) + reference * LN2).masked_fill(empty, math.inf),
    )
