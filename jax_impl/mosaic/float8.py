"""float8_e4m3fn numbers in registers, and the scales that they are stored with.

Widening is exact: every float8_e4m3fn number is a bfloat16 one. A product with a scale is
rounded once, from float32; subnormal numbers are kept on the way.
"""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_impl.mosaic import ptx

# Bits of float32. A UE8M0 byte u is 2^(u - 127): a subnormal number for 0, NaN for 255.
_UE8M0_ZERO = 1 << 22
_UE8M0_NAN_BYTE = 255
_NAN = 0x7FC00000


def widened(word: ir.Value, scale: ir.Value | None = None) -> list[ir.Value]:
    """The four numbers of a word as two words of two bfloat16, NaN as NaN.

    scale: a float32 that each of them is multiplied by; None for none.
    """
    multiply, operands, constraints = "", [word], "=r,=r,r"
    if scale is not None:
        multiply = "".join(f"mul.rn.f32 {name}, {name}, $3; " for name in "pqrs")
        operands, constraints = [word, scale], "=r,=r,r,f"
    both = ptx.asm(
        "{ .reg .b16 low, high, a, b, c, d; .reg .b32 x, y; .reg .f32 p, q, r, s; "
        "mov.b32 {low, high}, $2; "
        "cvt.rn.f16x2.e4m3x2 x, low; cvt.rn.f16x2.e4m3x2 y, high; "
        "mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.f32.f16 r, c; cvt.f32.f16 s, d; "
        f"{multiply}"
        "cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r; }",
        operands,
        constraints,
        ptx.struct(ptx.i32(), 2),
        pure=True,
    )
    return ptx.unpack(both, ptx.i32(), 2)


def ue8m0_scale(byte: ir.Value) -> ir.Value:
    """The float32 scale of a UE8M0 byte, which is an i32 of 0 to 255."""
    bits = arith.maxui(arith.shli(byte, ptx.constant(23)), ptx.constant(_UE8M0_ZERO))
    is_nan = ptx.equals(byte, _UE8M0_NAN_BYTE)
    return arith.bitcast(ptx.f32(), arith.select(is_nan, ptx.constant(_NAN), bits))


# Four instructions for two numbers, where `widened` takes seven: bits are moved into the place
# of a bfloat16's, which makes 2^-120 of every number (of subnormal ones too), and one product
# with a power of two puts that right together with the scale. Two things don't come out:
# a NaN code, which would be 480, and a factor beyond a bfloat16's range.
_MOVED_BY = 120
_BF16_MANTISSA_BITS = 7
_BOTH_HALVES = 0x00010001


def moved_factor(word: ir.Value, number: int) -> ir.Value:
    """What `moved` multiplies by for a byte of a word, a UE8M0 one under 128.

    2^(byte - 127 + 120) as two equal bfloat16.
    """
    added = _MOVED_BY * _BOTH_HALVES << _BF16_MANTISSA_BITS
    return ptx.asm(
        f"{{ .reg .b32 both; prmt.b32 both, $1, 0, 0x4{number}4{number}; "
        f"mad.lo.u32 $0, both, {1 << _BF16_MANTISSA_BITS}, {added:#x}; }}",
        [word],
        "=r,r",
        ptx.i32(),
        pure=True,
    )


def moved(word: ir.Value, factor: ir.Value) -> list[ir.Value]:
    """As `widened`, for codes that aren't NaN and a factor of a byte under 128."""
    # Each byte is extended by its sign, so that four places further the sign is in its place.
    both = ptx.asm(
        "{ .reg .b32 x, y; prmt.b32 x, $2, 0, 0x9180; prmt.b32 y, $2, 0, 0xb3a2; "
        "shl.b32 x, x, 4; shl.b32 y, y, 4; "
        "and.b32 x, x, 0x87f087f0; and.b32 y, y, 0x87f087f0; "
        "mul.rn.bf16x2 $0, x, $3; mul.rn.bf16x2 $1, y, $3; }",
        [word, factor],
        "=r,=r,r,r",
        ptx.struct(ptx.i32(), 2),
        pure=True,
    )
    return ptx.unpack(both, ptx.i32(), 2)


def note_nan_codes(noted: ir.Value, word: ir.Value) -> ir.Value:
    """`noted` with a sign bit set, in some byte, if a code of the word is NaN.

    A NaN's magnitude is 0x7f: adding 1 to it, or to a byte above one, carries into a sign.
    """
    return ptx.asm(
        "{ .reg .b32 t; add.u32 t, $2, 0x01010101; lop3.b32 $0, $1, $2, t, 0xf6; }",
        [noted, word],
        "=r,r,r",
        ptx.i32(),
        pure=True,
    )


def any_noted_in_warp(noted: ir.Value) -> ir.Value:
    """1 in every lane of a warp if some byte's sign bit is set in one of them, else 0."""
    return ptx.asm(
        "{ .reg .pred mine, any; .reg .b32 t; and.b32 t, $1, 0x80808080; setp.ne.u32 mine, t, 0; "
        "vote.sync.any.pred any, mine, 0xffffffff; selp.b32 $0, 1, 0, any; }",
        [noted],
        "=r,r",
        ptx.i32(),
    )
