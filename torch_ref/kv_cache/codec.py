"""Rows of values to fp8 codes with group scales, and back.

Encoder, per group of x (vLLM's quantize_and_insert_k_cache, FlashMLA's tests/quant.py):

    amax = max(|x|, floor)      e = ceil(log2(amax / 448))      code = e4m3(clamp(x / 2^e, +-448))

e4m3 rounds to nearest even. The clamp comes before the cast: a plain cast makes NaN of what lies
beyond 464. Both kinds of scale are written as powers of two: FlashMLA's Hopper kernel rounds fp32
scales to bf16 and other readers force them through UE8M0, so nothing else means the same to all.

Decoder: bf16(fp32(code * scale)), exact for a power of two unless bf16 under- or overflows. A NaN
code gives NaN. UE8M0 byte 0 is 2^-127; byte 255 is NaN, as the format has it (engines' readers
disagree there, and on byte 0; no encoder writes below 105).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Float, Float64, UInt8
from torch import Tensor

from torch_ref.kv_cache.formats import KVFormat

E4M3_MAX = 448.0

_UE8M0_BIAS = 127
# Not exp2 or ldexp of a tensor: both go through fp32, where 2^-127 is subnormal and 2^128 isn't.
_UE8M0_SCALES = torch.tensor([2.0 ** (u - _UE8M0_BIAS) for u in range(255)] + [math.nan]).double()


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """What a format keeps of N rows, as bytes: raw [N, r], codes [N, c], scales [N, s]."""

    raw: UInt8[Tensor, "N r"]
    codes: UInt8[Tensor, "N c"] | None = None
    scales: UInt8[Tensor, "N s"] | None = None


def ue8m0_scales(stored: UInt8[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """2^(u - 127) of each byte u, in float64; NaN for 255."""
    return _UE8M0_SCALES.to(stored.device)[stored.long()]


def ue8m0_bytes(amax: Float[Tensor, "..."], *, floor: float) -> UInt8[Tensor, "..."]:
    """The byte of the smallest power of two that brings max(amax, floor) down to 448 or less."""
    # In float64 amax / 448 is a power of two only where it truly is one: exactly at 448 * 2^n the
    # exponent is n, and nothing in fp32 comes nearer to that than float64 can tell.
    mantissa, exponent = torch.frexp(amax.double().clamp(min=floor) / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return (exponent + _UE8M0_BIAS).clamp(0, 255).to(torch.uint8)


def encode_e4m3(values: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """e4m3 codes of values, to nearest even and saturated at +-448; NaN gives a NaN code."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: UInt8[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """The values of e4m3 codes in float64; 0x7F and 0xFF are NaN."""
    return codes.contiguous().view(torch.float8_e4m3fn).float().double()


def encode(values: Float[Tensor, "N D"], layout: KVFormat) -> EncodedRows:
    """Rows of bf16 or fp32 as the layout keeps them; raw columns are rounded to bf16.

    ValueError: a quantised column that isn't finite, for which no scale exists.
    """
    quantised, raw = values[:, : layout.quantised], values[:, layout.quantised :]
    raw_bytes = _bytes(raw.bfloat16())
    if not layout.quantised:
        return EncodedRows(raw_bytes)
    bad = ~quantised.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"values: {float(quantised[row, column])} in row {row}, column {column}; accepted are "
            f"finite numbers in the {layout.quantised} columns that are quantised"
        )
    grouped = quantised.double().unflatten(1, (layout.groups, layout.group))  # N g group
    stored = ue8m0_bytes(grouped.abs().amax(-1), floor=layout.amax_floor)  # N g
    scales = ue8m0_scales(stored)
    codes = encode_e4m3(grouped / scales[..., None]).flatten(1)
    if layout.scale_kind == "fp32":
        stored = _bytes(scales.float())
    return EncodedRows(raw_bytes, codes, stored)


def decode(rows: EncodedRows, layout: KVFormat) -> BFloat16[Tensor, "N D"]:
    """The values of kept rows, rounded to bf16 once."""
    raw = rows.raw.contiguous().view(torch.bfloat16)
    if rows.codes is None or rows.scales is None:
        return raw
    scales = stored_scales(rows.scales, layout)  # N g
    values = decode_e4m3(rows.codes).unflatten(1, (layout.groups, layout.group))
    # The product is exact in float64, so this is the fp32 product rounded to bf16.
    values = (values * scales[..., None]).float().bfloat16().flatten(1)
    return torch.cat([values, raw], dim=1)


def stored_scales(stored: UInt8[Tensor, "N s"], layout: KVFormat) -> Float64[Tensor, "N g"]:
    """The scales that bytes stand for, in float64."""
    if layout.scale_kind == "ue8m0":
        return ue8m0_scales(stored)
    return stored.contiguous().view(torch.float32).double()


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
