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
