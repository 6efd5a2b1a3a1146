"""A float8 cache: its keys pass through registers, where they are widened to bfloat16.

Exact: every float8_e4m3fn number is a bfloat16 one. The tensor core would multiply float8 with
float8 alone, and only along rows, which the values are not stored by.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jax_impl.decode.kernel_sm90.problem import D, Problem
from jax_impl.mosaic import float8, mbarrier, ptx, registers
from jax_impl.mosaic.blocks import BLOCK_KEYS
from jax_impl.mosaic.layouts import SCALAR, TILE_BYTES, TILE_COLUMNS, Ref
from jax_impl.mosaic.ptx import MATMUL_REF, REF

_PIECE = 16  # bytes, and so numbers, that a thread loads at a time
_WORDS = _PIECE // 4
_LAYOUT = plgpu.Layout.WG_STRIDED((_WORDS * ptx.WARPGROUP,), _WORDS)
_PIECES = ptx.array_type((_WORDS * ptx.WARPGROUP,), jnp.int32, _LAYOUT)


def _pieces_per_row(columns: int) -> int:
    return columns // _PIECE


def _rows_per_step(columns: int) -> int:
    return ptx.WARPGROUP // _pieces_per_row(columns)


def load_narrow(
    kv_gmem: Ref, pages: tuple[Any, ...], first_in_page: Any, columns: Any, problem: Problem
) -> Any:
    """Starts loading some columns of a block; opaque, for store_widened."""
    rows_per_step = _rows_per_step(columns.size)
    steps = BLOCK_KEYS // rows_per_step

    @ptx.inline(REF, *[SCALAR] * (1 + len(pages)), returns=[_PIECES] * steps)
    def lower(_, kv, first_in_page, *pages):
        row = arith.divui(ptx.thread(), ptx.constant(_pieces_per_row(columns.size)))
        piece = arith.remui(ptx.thread(), ptx.constant(_pieces_per_row(columns.size)))
        loaded = []
        for step in range(steps):
            first = step * rows_per_step
            part = first // problem.rows_per_copy  # all rows of a step lie on one page
            first_row = ptx.times(ptx.wide(ptx.scalar(pages[part])), problem.page_size)
            row_in_page = ptx.plus(
                row, ptx.scalar(first_in_page), first - part * problem.rows_per_copy
            )
            address = ptx.plus(
                ptx.gmem_address(kv),
                ptx.times(arith.addi(first_row, ptx.wide(row_in_page)), D),
                ptx.times(piece, _PIECE),
                columns.start,
            )
            words = ptx.asm(
                "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
                [address],
                "=r,=r,=r,=r,l",
                ptx.struct(ptx.i32(), _WORDS),
            )
            loaded.append(_array_of(ptx.unpack(words, ptx.i32(), _WORDS)))
        return loaded

    return lower(kv_gmem, jnp.asarray(first_in_page, jnp.int32), *pages)


def widened_arrivals(problem: Problem) -> int:
    """How often store_widened arrives."""
    del problem
    return 1


def store_widened(
    place_smem: Ref, ready: Any, loaded: Any, kv_gmem: Ref, columns: Any, problem: Problem
) -> None:
    """Widens what load_narrow has brought, stores it for the tensor core, and says so."""
    del kv_gmem, problem  # the interpreter loads here
    columns = columns.size
    tiles = columns // TILE_COLUMNS
    rows_per_step = _rows_per_step(columns)
    pieces_per_tile = TILE_COLUMNS // _PIECE

    @ptx.inline(MATMUL_REF, *[_LAYOUT] * len(loaded))
    def lower(_, place, *loaded):
        row = arith.divui(ptx.thread(), ptx.constant(_pieces_per_row(columns)))
        piece = arith.remui(ptx.thread(), ptx.constant(_pieces_per_row(columns)))
        row_in_tile = ptx.bits(row, 7)
        address = ptx.plus(
            ptx.smem_address(place),
            ptx.times(ptx.shift_right(row, 3), tiles * TILE_BYTES),
            ptx.times(arith.divui(piece, ptx.constant(pieces_per_tile)), TILE_BYTES),
            ptx.times(row_in_tile, TILE_BYTES // 8),
        )
        # Two 16-byte pieces of bfloat16 for one of float8, permuted by the row's number.
        first = ptx.times(ptx.bits(piece, pieces_per_tile - 1), 2)
        targets = [
            ptx.plus(address, ptx.times(arith.xori(ptx.plus(first, i), row_in_tile), 16))
            for i in range(2)
        ]
        for step, array in enumerate(loaded):
            words = [half for word in _words_of(array) for half in float8.widened(word)]
            offset = step * (rows_per_step // 8) * tiles * TILE_BYTES
            for i, target in enumerate(targets):
                ptx.asm(
                    f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};",
                    [target, *words[i * _WORDS : (i + 1) * _WORDS]],
                    "r,r,r,r,r",
                )
        mbarrier.fence_generic_to_async()

    lower(place_smem, *loaded)
    plgpu.barrier_arrive(ready)


def _array_of(words: list[ir.Value]) -> mgpu.FragmentedArray:
    layout = _LAYOUT.to_mgpu()
    array = mgpu.FragmentedArray.splat(
        ptx.constant(0), (_WORDS * ptx.WARPGROUP,), layout, is_signed=True
    )
    array.registers.reshape(-1)[0] = vector.from_elements(
        ir.VectorType.get((_WORDS,), ptx.i32()), words
    )
    return array


def _words_of(array: mgpu.FragmentedArray) -> list[ir.Value]:
    register = array.registers.reshape(-1)[0]
    return [registers.element(register, i) for i in range(_WORDS)]
