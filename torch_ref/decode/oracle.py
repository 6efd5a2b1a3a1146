"""DCP causal decode in plain PyTorch: the float64 oracle, and the eager run of a kernel's recipe.

One rank of a group holds part of each request's keys (torch_ref.planning.sharding) and attends all
query tokens and heads to it. A row (token) sees the first n keys of its request on this rank, n
being its global bound brought to this rank (torch_ref.planning.decode). With z the scaled scores of
one token and head over these keys:

    m   = max_k z_k              L = sum_k exp(z_k - m)         lse = m + ln L
    out = sum_k exp(z_k - m) V_k / L                            V = the first 512 columns of a key

A row that sees no key, and every padded row, has out 0 and lse -inf, whatever q is. A NaN in q or
in a key that the row sees makes out and lse of that (token, head) NaN; keys past its count don't
reach it. torch_ref.merge puts the ranks' results together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from torch_ref.arguments import token_rows
from torch_ref.arithmetic import LN2, LOG2E, full_fp32_products, max_without_nan
from torch_ref.calls import called_with
from torch_ref.decode.inputs import (
    VALUE_WIDTH,
    DecodeCall,
    DecodeInputs,
    check_call,
    rows_with_keys,
)
from torch_ref.decode.variants import CONTRACT, DecodeVariant


@dataclass(frozen=True, eq=False)
class DecodeOracleResult:
    """What decode is in float64, and how large rounding P alone can make an error.

    out [R, H, 512]; lse [R, H] in natural-log units; p2 [R, H] is sqrt(sum_k p_k^2 |V_k|^2) with p
    the weights that multiply V; max_logits [R, H] is the largest scaled score, natural units, -inf
    without a key, whatever a variant does to the outputs. None where ranks were merged.
    """

    out: Float64[Tensor, "R H Dv"]
    lse: Float64[Tensor, "R H"]
    p2: Float64[Tensor, "R H"]
    max_logits: Float64[Tensor, "R H"] | None = None


@dataclass(frozen=True, eq=False)
class DecodeResult:
    """What a kernel returns: out [R, H, 512] (bf16, or fp32 for a merge) and lse fp32 [R, H]."""

    out: Float[Tensor, "R H Dv"]
    lse: Float32[Tensor, "R H"]


@dataclass(frozen=True, eq=False, kw_only=True)
class OracleCall(DecodeCall):
    """The arguments of dcp_decode_oracle."""

    rows: Sequence[int] | Tensor | None = None
    device: torch.device | str | None = None
    variant: DecodeVariant = CONTRACT


@called_with(OracleCall)
def dcp_decode_oracle(call: OracleCall) -> DecodeOracleResult:
    """Computes one rank's decode in float64.

    q [T, H, 576], H in 1..128, and kv_cache [pages, P, 576], each bf16 or float8_e4m3fn. A float8
    tensor's values are those stored times q_scale or kv_scale (one positive number per tensor; None
    is 1). Local key k of request b is row k % P of page block_table[b, k // P]; the table's entries
    past ceil(seq_lens[b] / P) are never read. P is any size that interleave divides.

    seq_lens [B] are this rank's key counts, total_lens [B] those of all ranks together, both with
    this step's tokens; request b's tokens are rows query_start_loc[b] to query_start_loc[b + 1] - 1
    of q, and rows from query_start_loc[-1] on are padding. All int32. Key k is visible to a token
    iff k < seq_lens[b] and its global position lies below the token's bound: total_lens[b] less the
    request's tokens after it, or total_lens[b] if not causal. sm_scale is any finite number,
    negative and 0 included. Special values: the module's docstring.

    rows computes only these rows of q, R of them and in this order (all of them for None). device
    says where to compute; the result stays there. variant asks for a known deviation instead of
    the contract. Finite inputs are assumed apart from NaN.

    ValueError names the argument that doesn't fit, what it was and what is accepted.
    """
    variant, inputs = call.variant, check_call(call).on(call.device)
    wanted = token_rows(call.rows, inputs.tokens, inputs.q.device)
    computed = token_rows(None, inputs.tokens, inputs.q.device) if variant.moves_rows else wanted
    changed = variant.change_inputs(inputs)
    request, counts = variant.visible(inputs)

    chosen = computed.tolist()
    out = changed.q.new_zeros(len(chosen), changed.heads, VALUE_WIDTH, dtype=torch.float64)
    lse = out.new_full(out.shape[:2], -math.inf)
    p2, max_logits = torch.zeros_like(lse), lse.clone()
    for row in rows_with_keys(changed, chosen, request, counts, torch.float64):
        out[row.at], lse[row.at], p2[row.at], max_logits[row.at] = _attend(
            changed, row.q, row.keys, variant
        )

    padding = inputs.rows.padding
    empty = [[counts[t] == 0 and not padding[t]] for t in chosen]
    empty = torch.tensor(empty, dtype=torch.bool, device=out.device).reshape(-1, 1)
    results = (*variant.change_outputs(inputs, empty, out, lse, p2), max_logits)
    if variant.moves_rows:
        results = tuple(result[wanted] for result in results)
    return DecodeOracleResult(*results)


def _attend(
    inputs: DecodeInputs, q: Tensor, keys: Tensor, variant: DecodeVariant
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The formula for one row over its keys [n, D]: out [H, Dv], and lse, p2 and m [H]."""
    values = variant.values(keys) * inputs.value_scale  # n Dv
    z = (q @ keys.mT) * inputs.score_scale  # H n
    m = max_without_nan(z)  # H
    # -inf - (-inf) would be NaN: where no score is left, any finite reference serves.
    reference = m.masked_fill(m == -math.inf, 0.0)
    p = torch.exp(z - reference[:, None])  # H n
    L = p.sum(-1)  # H
    norms = torch.linalg.vector_norm(values, dim=-1)  # n
    return (
        (p @ values) / L[:, None],
        reference + torch.log(L),
        torch.sqrt(p.square() @ norms.square()) / L,
        m,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class EagerCall(DecodeCall):
    """The arguments of dcp_decode."""

    out_dtype: torch.dtype = torch.bfloat16
    rows: Sequence[int] | Tensor | None = None
    device: torch.device | str | None = None


@called_with(EagerCall)
def dcp_decode(call: EagerCall) -> DecodeResult:
    """Computes one rank's decode eagerly, in the precision recipe of the SM90 kernels.

    Scores are fp32 products of the stored q and keys (both exact in bf16, float8 too) and go to
    base 2 with one factor that holds sm_scale, the scales of q and keys, and log2(e); P = exp2(s -
    max) is rounded to bf16 for P V, whose sum is fp32; L sums the unrounded P in fp32; the scale of
    V joins 1 / L, and out is rounded to out_dtype once. Each row has one reference maximum, where
    a kernel that walks in blocks has several: that moves the rounding of P, not its size.

    out_dtype is bf16 or fp32, the latter for partial results that are still to be merged. Other
    arguments, special values and errors are those of `dcp_decode_oracle`.
    """
    if call.out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"out_dtype: {call.out_dtype}; accepted are torch.bfloat16 and torch.float32"
        )
    inputs = check_call(call).on(call.device)
    chosen = token_rows(call.rows, inputs.tokens, inputs.q.device).tolist()
    out = inputs.q.new_zeros(len(chosen), inputs.heads, VALUE_WIDTH, dtype=call.out_dtype)
    lse = out.new_full(out.shape[:2], -math.inf, dtype=torch.float32)
    request, counts = inputs.rows.request, inputs.key_counts
    with full_fp32_products():
        for row in rows_with_keys(inputs, chosen, request, counts, torch.float32):
            out[row.at], lse[row.at] = _attend_fp32(inputs, row.q, row.keys)
    return DecodeResult(out, lse)


def _attend_fp32(inputs: DecodeInputs, q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    s2 = (q @ keys.mT) * (inputs.score_scale * LOG2E)  # H n
    m2 = max_without_nan(s2)  # H
    reference = m2.masked_fill(m2 == -math.inf, 0.0)
    p = torch.exp2(s2 - reference[:, None])  # H n
    L = p.sum(-1)  # H
    out = p.bfloat16().float() @ keys[:, :VALUE_WIDTH]  # H Dv
    return out * (inputs.value_scale / L)[:, None], torch.log(L) + reference * LN2
