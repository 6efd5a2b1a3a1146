"""Inline PTX: types, constants, addresses, and the wrapper that Pallas calls.

Needed where Pallas has no primitive, or has one that adds a barrier between the warps (its
stores to shared memory do).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from jax_impl.mosaic.layouts import MATMUL_TRANSFORMS, SCALAR

WARPGROUP = 128
WARP = 32
BF16_BYTES = 2


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    return ir.F32Type.get()


def struct(element: ir.Type, count: int) -> ir.Type:
    """What an asm with several results returns."""
    return llvm.StructType.get_literal([element] * count)


def constant(value: int, type: ir.Type | None = None) -> ir.Value:
    type = type or i32()
    return arith.constant(type, ir.IntegerAttr.get(type, value))


def asm(
    text: str,
    operands: Sequence[ir.Value] = (),
    constraints: str = "",
    result: ir.Type | None = None,
    *,
    pure: bool = False,
) -> ir.Value:
    """One inline-assembly statement; `pure` ones may be moved, merged and hoisted by LLVM."""
    return llvm.inline_asm(
        result or ir.Type.parse("!llvm.void"),
        list(operands),
        text,
        constraints,
        has_side_effects=not pure,
        asm_dialect=0,
    )


def inline(*argument_types: Any, returns: Any = None) -> Callable[..., Callable[..., Any]]:
    """Decorator: runs the function below it while lowering, on registers and addresses.

    argument_types: a layout for an array, plgpu.RefType for a ref. returns: what `array_type`
    makes, or a list of them.
    """
    return plgpu.inline_mgpu(arg_types=argument_types, return_type=returns)


def array_type(shape: tuple[int, ...], dtype: Any, layout: Any) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)


REF = plgpu.RefType()
MATMUL_REF = plgpu.RefType(MATMUL_TRANSFORMS)
SCALAR_I32 = array_type((), jnp.int32, SCALAR)


@contextlib.contextmanager
def only_if(condition: ir.Value) -> Iterator[None]:
    """Emits code for the threads in which the condition holds."""
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def smem_address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(i32(), mgpu_utils.memref_ptr(ref))


def gmem_address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(i64(), mgpu_utils.memref_ptr(ref))


def plus(address: ir.Value, *offsets: ir.Value | int) -> ir.Value:
    """address + offsets (unsigned 32-bit values or constants), as wide as the address."""
    for offset in offsets:
        if isinstance(offset, int):
            offset = constant(offset, address.type)
        elif offset.type != address.type:
            offset = arith.extui(address.type, offset)
        address = arith.addi(address, offset)
    return address


def times(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, constant(factor, value.type))


def wide(value: ir.Value) -> ir.Value:
    """A row or token number as 64 bits, before it is multiplied into a byte offset."""
    return arith.extui(i64(), value)


def scalar(array: mgpu.FragmentedArray) -> ir.Value:
    return array.registers.item()


def splat(value: ir.Value, *, is_signed: bool = True) -> mgpu.FragmentedArray:
    return mgpu.FragmentedArray.splat(value, (), is_signed=is_signed)


def anew(value: ir.Value) -> ir.Value:
    """The same i32, of which nothing is kept in registers that was once made from it."""
    return asm("mov.b32 $0, $1;", [value], "=r,r", i32())


def thread() -> ir.Value:
    """The number of this thread in its warpgroup."""
    return arith.remui(mgpu_utils.thread_idx(), constant(WARPGROUP))


def bits(value: ir.Value, mask: int) -> ir.Value:
    return arith.andi(value, constant(mask))


def shift_right(value: ir.Value, count: int) -> ir.Value:
    return arith.shrui(value, constant(count))


def as_i32(condition: ir.Value) -> ir.Value:
    return arith.extui(i32(), condition)


def equals(left: ir.Value, right: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, left, constant(right))


def names(first: int, count: int) -> str:
    """The operands $first, $first+1, ... as an asm's vector operand lists them."""
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


def unpack(values: ir.Value, element: ir.Type, count: int) -> list[ir.Value]:
    """The results of an asm that has several."""
    return [llvm.extractvalue(element, values, [i]) for i in range(count)]
