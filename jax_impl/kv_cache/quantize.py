"""Rows of values to the bytes of a token, and back: float8 codes, scales, rounding.

Scales. A UE8M0 byte u is 2^(u - 127); byte 0 is 2^-127, a subnormal float32, and byte 255 is
NaN, as the E8M0 format of the OCP microscaling specification has it. CUDA readers differ at
these two ends (0 or 2^-127; infinity or NaN), which no writer reaches from
finite values below 448 * 2^127: the floor of amax keeps its bytes at 105 and more.

Powers of two are found and applied as integers, on the bits of floats: log2 and exp2 are
approximate, and XLA flushes subnormal float32 numbers to zero on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.kv_cache.formats import BF16_BYTES, Quantised, ScaleKind, ScaleRule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt8, UInt16

E4M3_MAX = 448.0
_NAN_CODE = 0x7F
_UE8M0_BIAS = 127
UE8M0_NAN = 0xFF

_F32_BIAS = 127
_F32_MANTISSA_BITS = 23
_F32_MANTISSA = 0x7FFFFF
_F32_MANTISSA_OF_E4M3_MAX = 0x600000  # 448 = 1.75 * 2^8
_E4M3_MAX_EXPONENT = 8

_BF16_MANTISSA_BITS = 7
_BF16_HIDDEN_BIT = 0x80
_BF16_INF = 0x7F80
_BF16_NAN = 0x7FC0


class Encoded(NamedTuple):
    """What a writer stores of the quantised columns of some rows."""

    codes: UInt8[Array, "N columns"]
    scales: UInt8[Array, "N bytes"]


def encode(values: Float[Array, "N columns"], quantised: Quantised, rule: ScaleRule) -> Encoded:
    """Quantises float32 or bfloat16 values, as vLLM's and FlashMLA's writers do (formats.py).

    A group with a NaN or an infinity becomes NaN as a whole, in its codes and its scale.
    """
    groups = values.astype(jnp.float32).reshape(-1, quantised.groups, quantised.group)
    largest = jnp.abs(groups).max(axis=-1)
    finite = jnp.isfinite(largest)
    amax = jnp.where(finite, jnp.maximum(largest, jnp.float32(rule.amax_floor)), 1.0)
    if rule.power_of_two:
        exponent = scale_exponent(amax)
        scale = power_of_two(exponent)
        scaled = groups * power_of_two(-exponent)[..., None]  # exact, as a division would be
    else:
        scale = _divided(amax, jnp.float32(E4M3_MAX))
        scaled = _divided(groups, scale[..., None])
    codes = jnp.where(finite[..., None], e4m3_codes(scaled), jnp.uint8(_NAN_CODE))
    scale_bits = lax.bitcast_convert_type(jnp.where(finite, scale, jnp.nan), jnp.int32)
    return Encoded(
        codes.reshape(-1, quantised.columns), _stored_scales(scale_bits, quantised.scale_kind)
    )


def _divided(values: jax.Array, by: jax.Array) -> jax.Array:
    """values / by, rounded once. XLA multiplies by the reciprocal where it sees that many values
    have one divisor."""
    return values / lax.optimization_barrier(jnp.broadcast_to(by, values.shape))


def _stored_scales(scale_bits: Int[Array, "N groups"], kind: ScaleKind) -> UInt8[Array, "N bytes"]:
    """Bits of float32 scales as bytes. UE8M0 takes the exponent alone: that of NaN is 255."""
    if kind == "ue8m0":
        return (scale_bits >> _F32_MANTISSA_BITS).astype(jnp.uint8)
    as_bytes = lax.bitcast_convert_type(scale_bits, jnp.uint8)
    return as_bytes.reshape(scale_bits.shape[0], -1)


def bf16_bits(values: Float[Array, "*rest"]) -> UInt16[Array, "*rest"]:
    """The bits of values rounded to bfloat16."""
    return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)


def e4m3_codes(values: Float[Array, "*rest"]) -> UInt8[Array, "*rest"]:
    """The nearest float8_e4m3fn numbers, halves to even; beyond +-448 it is +-448.

    A plain cast makes NaN of 465 and more.
    """
    held = jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(held, jnp.uint8)


def scale_exponent(amax: Float[Array, "*rest"]) -> Int[Array, "*rest"]:
    """ceil(log2(amax / 448)) of positive normal float32 numbers, exactly.

    At amax = 448 * 2^n it is n; an approximate log2 may give n + 1.
    """
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    exponent = (bits >> _F32_MANTISSA_BITS) - (_F32_BIAS + _E4M3_MAX_EXPONENT)
    return exponent + ((bits & _F32_MANTISSA) > _F32_MANTISSA_OF_E4M3_MAX)


def power_of_two(exponent: Int[Array, "*rest"]) -> Float[Array, "*rest"]:
    """2^exponent as float32, for exponents of normal numbers."""
    bits = (exponent + _F32_BIAS) << _F32_MANTISSA_BITS
    return lax.bitcast_convert_type(bits, jnp.float32)


def decode(
    codes: UInt8[Array, "*rest columns"],
    scales: UInt8[Array, "*rest bytes"],
    plain: UInt8[Array, "*rest bytes"],
    quantised: Quantised,
) -> UInt16[Array, "*rest D"]:
    """The bfloat16 bits of rows: code times scale in float32, rounded once; plain columns as
    they are.

    Exact for power-of-two scales wherever bfloat16 can hold the product, subnormal numbers
    included; rounded to even below, infinite above.
    """
    groups = codes.reshape(*codes.shape[:-1], quantised.groups, quantised.group)
    if quantised.scale_kind == "ue8m0":
        bits = e4m3_times_ue8m0(groups, scales[..., None])
    else:
        product = _e4m3_values(groups) * scale_values(scales, quantised)[..., None]
        # Rounded here and for good: XLA may leave out a cast that another one undoes.
        product = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
        bits = bf16_bits(product)
    pairs = plain.reshape(*plain.shape[:-1], -1, BF16_BYTES)
    plain_bits = lax.bitcast_convert_type(pairs, jnp.uint16)
    return jnp.concatenate([bits.reshape(codes.shape), plain_bits], axis=-1)


def scale_values(
    scales: UInt8[Array, "*rest bytes"], quantised: Quantised
) -> Float[Array, "*rest groups"]:
    """The scales as float32 numbers.

    The bits are right for every byte, but arithmetic on a CPU takes 2^-127 for 0.
    """
    if quantised.scale_kind == "ue8m0":
        return lax.bitcast_convert_type(ue8m0_bits(scales), jnp.float32)
    words = scales.reshape(*scales.shape[:-1], quantised.groups, 4)
    return lax.bitcast_convert_type(words, jnp.float32)


def ue8m0_bits(scales: UInt8[Array, "*rest"]) -> Int[Array, "*rest"]:
    """The bits of 2^(u - 127) as float32: a subnormal number for 0, NaN for 255."""
    byte = scales.astype(jnp.int32)
    bits = jnp.where(byte == 0, 1 << (_F32_MANTISSA_BITS - 1), byte << _F32_MANTISSA_BITS)
    return jnp.where(byte == UE8M0_NAN, 0x7FC00000, bits)


def e4m3_times_ue8m0(
    codes: UInt8[Array, "*rest"], scales: UInt8[Array, "*rest"]
) -> UInt16[Array, "*rest"]:
    """The bfloat16 bits of code * 2^(u - 127), for every pair of bytes.

    Multiplying by a power of two moves the exponent. A code's three bits of mantissa fit a
    bfloat16, so only what falls below the normal numbers is ever rounded (to even).
    """
    code_bits = lax.bitcast_convert_type(_e4m3_values(codes), jnp.int32) >> 16
    sign, magnitude = code_bits & 0x8000, code_bits & 0x7FFF
    mantissa = magnitude & (_BF16_HIDDEN_BIT - 1)
    scale = scales.astype(jnp.int32)
    exponent = (magnitude >> _BF16_MANTISSA_BITS) + scale - _UE8M0_BIAS
    normal = (exponent << _BF16_MANTISSA_BITS) | mantissa
    # Nothing is left of eight significant bits that are moved by nine or more.
    places = jnp.clip(1 - exponent, 0, _BF16_MANTISSA_BITS + 2)
    subnormal = _shifted_to_even(_BF16_HIDDEN_BIT | mantissa, places)
    bits = jnp.where(exponent > 0, jnp.minimum(normal, _BF16_INF), subnormal)
    bits = jnp.where(magnitude == 0, 0, bits) | sign
    is_nan = (magnitude > _BF16_INF) | (scale == UE8M0_NAN)
    return jnp.where(is_nan, _BF16_NAN, bits).astype(jnp.uint16)


def _e4m3_values(codes: UInt8[Array, "*rest"]) -> Float[Array, "*rest"]:
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _shifted_to_even(value: jax.Array, places: jax.Array) -> jax.Array:
    """value / 2^places, rounded to the nearest integer, halves to the even one."""
    odd = (value >> places) & 1
    half = (1 << places) >> 1
    return (value + jnp.maximum(half - 1, 0) + jnp.where(places > 0, odd, 0)) >> places
