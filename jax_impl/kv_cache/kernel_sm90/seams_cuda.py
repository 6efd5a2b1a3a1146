"""The hardware's side of the seams: what the gather does on a Hopper GPU.

Each function has a namesake in seams_interpret.py that does the same for Pallas' interpreter.
Docstrings stand here. Refs are Pallas refs, arrays have one value per row in rows_layout,
`problem` is static.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jax_impl.kv_cache.formats import BF16_BYTES, Field, ScaleKind
from jax_impl.kv_cache.kernel_sm90 import pieces
from jax_impl.kv_cache.kernel_sm90.pieces import Step
from jax_impl.kv_cache.kernel_sm90.problem import Problem, rows_layout
from jax_impl.mosaic import float8, ptx, registers
from jax_impl.mosaic.layouts import SCALAR
from jax_impl.mosaic.ptx import REF

__all__ = ["copy_rows", "load_pages"]

_WORDS = pieces.WRITTEN_BYTES // 4
_I32 = 4
_SCALE_BYTES: dict[ScaleKind, int] = {"ue8m0": 1, "float32": 4}


def load_pages(table_gmem: Any, request: Any, column: Any) -> Any:
    """The entries of a request's row of the block table, one per row; columns that there are."""
    columns = table_gmem.shape[1]
    layout = rows_layout(column.shape[0])

    @ptx.inline(REF, SCALAR, layout, returns=ptx.array_type(column.shape, jnp.int32, layout))
    def lower(_, table, request, column):
        row = ptx.plus(
            ptx.gmem_address(table), ptx.times(ptx.wide(ptx.scalar(request)), columns * _I32)
        )
        loaded = [
            ptx.asm(
                "ld.global.nc.b32 $0, [$1];",
                [ptx.plus(row, ptx.times(ptx.wide(value), _I32))],
                "=r,l",
                ptx.i32(),
            )
            for value in registers.key_values(column)
        ]
        return _rows_of(loaded, column.shape)

    return lower(table_gmem, request, column)


def _rows_of(values: list[ir.Value], shape: tuple[int, ...]) -> mgpu.FragmentedArray:
    layout = rows_layout(shape[0]).to_mgpu()
    array = np.empty(layout.registers_shape(shape), dtype=object)
    one = ir.VectorType.get((1,), ptx.i32())
    array.reshape(-1)[:] = [vector.broadcast(one, value) for value in values]
    return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=True)


def copy_rows(cache_gmem: Any, workspace_gmem: Any, rows: Any, problem: Problem) -> None:
    """Dequantises the token of each wanted row into it; the others are neither read nor written.

    Loads of all rows of a warp are in flight before the first is waited for.
    """
    pieces.check_alignment(problem.layout, problem.page_size)
    layout = rows_layout(rows.row.shape[0])

    @ptx.inline(REF, REF, SCALAR, *[layout] * 4)
    def lower(_, cache, workspace, request, row, page, token, wanted):
        cache = ptx.gmem_address(cache)
        lanes = [_Lane.of(step, problem) for step in pieces.steps(problem.layout)]
        places = zip(*(map(registers.key_values, (row, page, token, wanted))), strict=True)
        loaded = []
        for row, page, token, wanted in places:
            words = [lane.load(cache, page, token, wanted) for lane in lanes]
            target = row_address(ptx.gmem_address(workspace), problem, ptx.scalar(request), row)
            target = ptx.plus(target, ptx.times(_lane(), pieces.WRITTEN_BYTES))
            loaded.append((target, wanted, words))
        for target, wanted, words in loaded:
            for lane, held in zip(lanes, words, strict=True):
                lane.store(target, wanted, held)

    lower(cache_gmem, workspace_gmem, *rows)


class _Held(NamedTuple):
    """What a lane has loaded of a piece, as far as some lane of the step needs it."""

    codes: list[ir.Value]
    scale: ir.Value | None
    plain: list[ir.Value]


class _Lane(NamedTuple):
    """This lane's piece of every row, in one step."""

    step: Step
    problem: Problem
    reads_codes: ir.Value  # i1
    reads_plain: ir.Value
    piece: ir.Value  # its number in the row

    @classmethod
    def of(cls, step: Step, problem: Problem) -> _Lane:
        codes = _less(_lane(), step.code_lanes)
        plain = arith.andi(_less(_lane(), step.lanes), _not(codes))
        return cls(step, problem, codes, plain, ptx.plus(_lane(), step.first))

    def load(self, cache: ir.Value, page: ir.Value, token: ir.Value, wanted: ir.Value) -> _Held:
        """Codes and bfloat16 go to registers of their own: two loads into the same ones would
        have to wait for one another."""
        layout, code_lanes = self.problem.layout, self.step.code_lanes
        codes, scale, plain = [], None, []
        if layout.quantised is not None and code_lanes:
            quantised = layout.quantised
            mine = arith.andi(wanted, self.reads_codes)
            address = field_address(cache, self.problem, quantised.codes, page, token)
            address = ptx.plus(address, ptx.times(self.piece, pieces.CODE_BYTES))
            codes = _load(address, mine, pieces.CODE_BYTES, "L1::no_allocate.")
            size = _SCALE_BYTES[quantised.scale_kind]
            group = arith.divui(self.piece, ptx.constant(quantised.group // pieces.COLUMNS))
            address = field_address(cache, self.problem, quantised.scales, page, token)
            (scale,) = _load(ptx.plus(address, ptx.times(group, size)), mine, size)
        if code_lanes < self.step.lanes:
            mine = arith.andi(wanted, self.reads_plain)
            address = field_address(cache, self.problem, layout.plain, page, token)
            piece = ptx.plus(self.piece, -(layout.quantised_columns // pieces.COLUMNS))
            address = ptx.plus(address, ptx.times(piece, pieces.WRITTEN_BYTES))
            plain = _load(address, mine, pieces.WRITTEN_BYTES, "L1::no_allocate.")
        return _Held(codes, scale, plain)

    def store(self, target: ir.Value, wanted: ir.Value, held: _Held) -> None:
        words = held.plain
        if held.scale is not None:
            scale = self._scale_value(held.scale)
            words = [half for word in held.codes for half in float8.widened(word, scale)]
            if held.plain:
                words = [
                    arith.select(self.reads_codes, *pair)
                    for pair in zip(words, held.plain, strict=True)
                ]
        mine = arith.andi(wanted, arith.ori(self.reads_codes, self.reads_plain))
        offset = self.step.first * pieces.WRITTEN_BYTES
        ptx.asm(
            "{ .reg .pred mine; setp.ne.s32 mine, $1, 0; "
            f"@mine st.global.v4.b32 [$0+{offset}], {{$2, $3, $4, $5}}; }}",
            [target, ptx.as_i32(mine), *words],
            "l,r,r,r,r,r",
        )

    def _scale_value(self, stored: ir.Value) -> ir.Value:
        quantised = self.problem.layout.quantised
        assert quantised is not None
        if quantised.scale_kind == "ue8m0":
            return float8.ue8m0_scale(stored)
        return arith.bitcast(ptx.f32(), stored)


def _load(address: ir.Value, wanted: ir.Value, size: int, caching: str = "") -> list[ir.Value]:
    """`size` bytes that no kernel writes meanwhile, as 32-bit words; anything if not wanted."""
    count = max(size // 4, 1)
    kind = {1: "u8", 4: "b32", 8: "v2.b32", 16: "v4.b32"}[size]
    held = ptx.names(0, count) if count > 1 else "$0"
    result = ptx.asm(
        f"{{ .reg .pred wanted; setp.ne.s32 wanted, ${count + 1}, 0; "
        f"@wanted ld.global.nc.{caching}{kind} {held}, [${count}]; }}",
        [address, ptx.as_i32(wanted)],
        "=r," * count + "l,r",
        ptx.struct(ptx.i32(), count) if count > 1 else ptx.i32(),
    )
    return ptx.unpack(result, ptx.i32(), count) if count > 1 else [result]


def field_address(
    cache: ir.Value, problem: Problem, field: Field, page: ir.Value, token: ir.Value
) -> ir.Value:
    """Where a token has a field. A page's first byte takes 64 bits, a place within it 31."""
    layout = problem.layout
    return ptx.plus(
        cache,
        ptx.times(ptx.wide(page), layout.page_stride(problem.page_size)),
        ptx.times(token, layout.token_stride(field)),
        layout.first_byte(field, problem.page_size),
    )


def row_address(
    workspace: ir.Value, problem: Problem, request: ir.Value, row: ir.Value
) -> ir.Value:
    """Where a row of a request begins."""
    first_row = ptx.times(ptx.wide(request), problem.num_rows)
    number = arith.addi(first_row, ptx.wide(row))
    return ptx.plus(workspace, ptx.times(number, problem.layout.d * BF16_BYTES))


def _lane() -> ir.Value:
    return ptx.bits(ptx.thread(), ptx.WARP - 1)


def _less(value: ir.Value, bound: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, value, ptx.constant(bound))


def _not(condition: ir.Value) -> ir.Value:
    return arith.xori(condition, ptx.constant(1, condition.type))
