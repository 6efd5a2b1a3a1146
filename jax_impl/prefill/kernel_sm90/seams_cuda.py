"""The hardware's side of the seams: what the kernel does on a Hopper GPU.

Every function here has its counterpart in seams_interpret.py, and a docstring there or here
says what both promise. `problem` is static; refs are TransformedRefs of Pallas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from jax_impl.mosaic import mbarrier, ptx, registers, wgmma
from jax_impl.mosaic.layouts import (
    KEY,
    KEYS_PER_STEP,
    MATMUL_TRANSFORMS,
    MATRIX,
    ROW,
    SCALAR,
    THREADS_PER_KEY,
    TILE_BYTES,
)
from jax_impl.prefill.kernel_sm90 import barriers
from jax_impl.prefill.kernel_sm90.problem import BLOCK_KEYS, SIDE_COLUMNS, TILE_HEADS, Problem

_REF = plgpu.RefType()
_MATMUL_REF = plgpu.RefType(MATMUL_TRANSFORMS)
_ROWS = ptx.array_type((TILE_HEADS,), jnp.float32, ROW)
_STEPS = BLOCK_KEYS // KEYS_PER_STEP
_CHUNK = 16  # bytes that one cp.async moves
_CACHE_LINE = 128
_BF16 = 2
_I32 = 4


# --- Scratch memory -----------------------------------------------------------------------


def barrier_scratch() -> Any:
    return plgpu.SMEM((mbarrier.WORDS * barriers.COUNT,), jnp.int32)


def matmul_scratch(shape: tuple[int, ...]) -> Any:
    """A bfloat16 matrix that the tensor core can read."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=MATMUL_TRANSFORMS)


# --- Barriers -----------------------------------------------------------------------------


def initialise_barriers(barriers_smem: Any) -> None:
    @ptx.inline(_REF)
    def lower(_, base):
        counts = [ptx.WARPGROUP * arrivals for arrivals in barriers.ARRIVALS_PER_THREAD]
        mbarrier.initialise(ptx.smem_address(base), counts)

    lower(barriers_smem)


def wait(barriers_smem: Any, barrier: int, phase: Any, *, before_products: bool = False) -> None:
    """Waits for the end of a phase; phase -1 has ended before the kernel began.

    before_products: a matrix product is to read what the gather has written.
    """

    @ptx.inline(_REF, SCALAR)
    def lower(_, base, phase):
        mbarrier.wait(ptx.smem_address(base), barrier, ptx.scalar(phase))
        if before_products:
            mbarrier.fence_generic_to_async()

    lower(barriers_smem, phase)


def arrive(barriers_smem: Any, barrier: int, *, before_products: bool = False) -> None:
    """before_products: a matrix product of another warpgroup is to read what was stored."""

    @ptx.inline(_REF)
    def lower(_, base):
        if before_products:
            mbarrier.fence_generic_to_async()
        mbarrier.arrive(ptx.smem_address(base), barrier)

    lower(barriers_smem)


def arrive_after_copies(barriers_smem: Any, barrier: int) -> None:
    """Arrives once the copies that this warpgroup has started so far have landed."""

    @ptx.inline(_REF)
    def lower(_, base):
        mbarrier.arrive_after_copies(ptx.smem_address(base), barrier)

    lower(barriers_smem)


# --- The producer -------------------------------------------------------------------------


def _key_in_step() -> ir.Value:
    """The key of a step of 16 that this thread serves."""
    return arith.divui(ptx.thread(), ptx.constant(THREADS_PER_KEY))


def _place_at_key() -> ir.Value:
    """Which of the eight threads that share a key this one is."""
    return arith.remui(ptx.thread(), ptx.constant(THREADS_PER_KEY))


def _if(condition: ir.Value):
    """`with _if(c):` emits code for the threads in which c holds."""
    branch = scf.IfOp(condition)
    return _Branch(branch)


class _Branch:
    def __init__(self, branch: scf.IfOp):
        self._point = ir.InsertionPoint(branch.then_block)

    def __enter__(self) -> None:
        self._point.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            scf.yield_([])
        self._point.__exit__(*exception)


def load_indices(indices_gmem: Any, token: Any, first_slot: Any) -> Any:
    """The indices of one block of a token's list, [64] int32."""
    row_bytes = indices_gmem.shape[1] * _I32

    @ptx.inline(_REF, SCALAR, SCALAR, returns=ptx.array_type((BLOCK_KEYS,), jnp.int32, KEY))
    def lower(_, indices, token, first_slot):
        address = ptx.plus(
            ptx.gmem_address(indices),
            ptx.times(ptx.wide(ptx.scalar(token)), row_bytes),
            ptx.times(ptx.scalar(first_slot), _I32),
            ptx.times(_key_in_step(), _I32),
        )
        return registers.keys_of(
            [
                ptx.asm(
                    f"ld.global.nc.b32 $0, [$1+{step * KEYS_PER_STEP * _I32}];",
                    [address],
                    "=r,l",
                    ptx.i32(),
                )
                for step in range(_STEPS)
            ]
        )

    return lower(indices_gmem, token, first_slot)


def publish(values_smem: Any, values: Any) -> None:
    """Stores one float32 per key; visible to whoever waits for this warpgroup's arrival."""

    @ptx.inline(_REF, KEY)
    def lower(_, ref, values):
        address = ptx.plus(ptx.smem_address(ref), ptx.times(_key_in_step(), 4))
        with _if(ptx.equals(_place_at_key(), 0)):
            for step, value in enumerate(registers.key_values(values)):
                ptx.asm(
                    f"st.shared.f32 [$0+{step * KEYS_PER_STEP * 4}], $1;", [address, value], "r,f"
                )

    lower(values_smem, values)


def copy_columns(
    kv_gmem: Any,
    kv_smem: Any,
    slot: int,
    *,
    tiles: Sequence[int],
    rows: Any,
    valid: Any,
    l2_prefetch: str,
) -> None:
    """Starts the copy of some 64-column tiles of a block's rows; zeros where not valid."""
    d_qk = kv_gmem.shape[1]
    row_bytes = d_qk * _BF16
    tile_row_bytes = row_bytes * 8
    prefetch = f".L2::{l2_prefetch}" if l2_prefetch else ""

    @ptx.inline(_REF, _MATMUL_REF, KEY, KEY)
    def lower(_, kv, kv_smem, rows, valid):
        key, place = _key_in_step(), _place_at_key()
        # A slot is stored in tiles of 8 rows by 64 columns; the 16-byte pieces of a row are
        # permuted by the row's number, so that neither side meets a bank conflict.
        key_in_tile = ptx.bits(key, 7)
        target = ptx.plus(
            ptx.smem_address(kv_smem),
            ptx.times(ptx.shift_right(key, 3), tile_row_bytes),
            ptx.times(key_in_tile, _CACHE_LINE),
            ptx.times(arith.xori(place, key_in_tile), _CHUNK),
        )
        piece = ptx.plus(ptx.gmem_address(kv), ptx.times(place, _CHUNK))
        # Rows are read by several tiles, everything else once.
        policy = ptx.asm(
            "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", [], "=l", ptx.i64(), pure=True
        )
        numbers, flags = registers.key_values(rows), registers.key_values(valid)
        for step in range(_STEPS):
            source = ptx.plus(piece, ptx.times(ptx.wide(numbers[step]), row_bytes))
            size = arith.select(flags[step], ptx.constant(_CHUNK), ptx.constant(0))
            first = slot * BLOCK_KEYS * row_bytes + step * (KEYS_PER_STEP // 8) * tile_row_bytes
            for tile in tiles:
                ptx.asm(
                    f"cp.async.cg.shared.global.L2::cache_hint{prefetch} "
                    f"[$0+{first + tile * TILE_BYTES}], [$1+{tile * _CACHE_LINE}], "
                    f"{_CHUNK}, $2, $3;",
                    [target, source, size, policy],
                    "r,l,r,l",
                )

    if len(tiles):
        lower(kv_gmem, kv_smem, rows, valid)


def prefetch_queries(q_gmem: Any, tile_number: Any) -> None:
    """Asks L2 for the queries of a tile; those of consecutive tiles lie one after another."""
    tile_bytes = TILE_HEADS * q_gmem.shape[2] * _BF16
    thread_bytes = tile_bytes // ptx.WARPGROUP

    @ptx.inline(_REF, SCALAR)
    def lower(_, q, tile_number):
        address = ptx.plus(
            ptx.gmem_address(q),
            ptx.times(ptx.wide(ptx.scalar(tile_number)), tile_bytes),
            ptx.times(ptx.thread(), thread_bytes),
        )
        for offset in range(0, thread_bytes, _CACHE_LINE):
            ptx.asm(f"prefetch.global.L2 [$0+{offset}];", [address], "l")

    lower(q_gmem, tile_number)


def prefetch_rows(
    kv_gmem: Any, indices: Sequence[Any], exists: Sequence[Any], tile_number: Any, sharers: int
) -> None:
    """Asks L2 for this tile's share of the rows of a pair of blocks.

    `sharers` tiles of consecutive numbers need the same rows; each asks for every
    `sharers`-th.
    """
    row_bytes = kv_gmem.shape[1] * _BF16
    count = len(indices)

    @ptx.inline(_REF, SCALAR, *[KEY] * (2 * count))
    def lower(_, kv, tile_number, *arrays):
        rows = [v for array in arrays[:count] for v in registers.key_values(array)]
        flags = [v for array in arrays[count:] for v in registers.key_values(array)]
        # The threads of a key hold the same rows, one for each of them: the p-th asks for the
        # p-th.
        assert len(rows) == THREADS_PER_KEY
        place = _place_at_key()
        row, wanted = rows[0], flags[0]
        for other in range(1, THREADS_PER_KEY):
            mine = ptx.equals(place, other)
            row = arith.select(mine, rows[other], row)
            wanted = arith.select(mine, flags[other], wanted)
        share = arith.remui(ptx.scalar(tile_number), ptx.constant(sharers))
        is_mine = arith.cmpi(
            arith.CmpIPredicate.eq, arith.remui(place, ptx.constant(sharers)), share
        )
        wanted = arith.andi(wanted, is_mine)
        row = arith.select(wanted, row, ptx.constant(0))
        address = ptx.plus(ptx.gmem_address(kv), ptx.times(ptx.wide(row), row_bytes))
        ptx.asm(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $1, 0; "
            f"@wanted cp.async.bulk.prefetch.L2.global [$0], {row_bytes}; }}",
            [address, ptx.as_i32(wanted)],
            "l,r",
        )

    lower(kv_gmem, tile_number, *indices, *exists)


# --- Matrix products ----------------------------------------------------------------------


def start_scores(
    scores: Any, q_smem: Sequence[Any], keys_smem: Any, tiles: Sequence[int], problem: Problem
) -> Any:
    """scores + Q K^T over some column tiles, as one group; scores None: from zero.

    The result may be used after finish_products has named it.
    """
    split = problem.right_tiles.start
    widths = (SIDE_COLUMNS, problem.d_qk - SIDE_COLUMNS)

    def lower(_, *arguments):
        *before, q_left, q_right, keys = arguments
        values = registers.matrix_values(before[0]) if before else None
        if not before:
            wgmma.order_registers()
        q_parts = [
            wgmma.SmemMatrix.of(ref, width)
            for ref, width in zip((q_left, q_right), widths, strict=True)
        ]
        keys = wgmma.SmemMatrix.of(keys, problem.d_qk)
        for tile in tiles:
            part, first_tile = (0, 0) if tile < split else (1, split)
            for step in range(problem.steps_per_tile):
                values = wgmma.multiply(
                    values,
                    BLOCK_KEYS,
                    q_parts[part].depth_along_columns(tile - first_tile, step),
                    keys.depth_along_columns(tile, step),
                    b_transposed=False,
                )
        wgmma.commit()
        return registers.matrix_of(values, BLOCK_KEYS)

    carried = [] if scores is None else [scores]
    returns = ptx.array_type((TILE_HEADS, BLOCK_KEYS), jnp.float32, MATRIX)
    types = [MATRIX] * len(carried) + [_MATMUL_REF] * 3
    return ptx.inline(*types, returns=returns)(lower)(*carried, *q_smem, keys_smem)


def _accumulate(
    accumulator: Any, first_operands: Sequence[Any], values: Any, side: int, problem: Problem
):
    """Emits accumulator + weights times one side's values, as one group."""
    matrix = wgmma.SmemMatrix.of(values, problem.d_qk)
    first_tile = problem.value_tiles(side).start
    sums = registers.matrix_values(accumulator)
    for step, weights in enumerate(first_operands):
        sums = wgmma.multiply(
            sums,
            SIDE_COLUMNS,
            weights,
            matrix.depth_along_rows(first_tile, step),
            b_transposed=True,
        )
    wgmma.commit()
    return registers.matrix_of(sums, SIDE_COLUMNS)


_DEPTH_STEPS = BLOCK_KEYS // wgmma.DEPTH
_ACCUMULATOR = ptx.array_type((TILE_HEADS, SIDE_COLUMNS), jnp.float32, MATRIX)


def start_values_of_registers(
    acc: Any, weights: Any, values_smem: Any, side: int, problem: Problem
) -> Any:
    """acc + weights [64, 64] times one side's values of a slot, as one group."""

    @ptx.inline(MATRIX, MATRIX, _MATMUL_REF, returns=_ACCUMULATOR)
    def lower(_, acc, weights, values):
        (weights,) = wgmma.pin(weights)
        (acc,) = wgmma.pin(acc)
        wgmma.order_registers()
        operands = [wgmma.a_registers(weights, step) for step in range(_DEPTH_STEPS)]
        return _accumulate(acc, operands, values, side, problem)

    return lower(acc, weights, values_smem)


def start_values_of_smem(
    acc: Any, weights_smem: Any, values_smem: Any, side: int, problem: Problem
) -> Any:
    """The same with weights that have been handed over in shared memory."""

    @ptx.inline(MATRIX, _MATMUL_REF, _MATMUL_REF, returns=_ACCUMULATOR)
    def lower(_, acc, weights, values):
        (acc,) = wgmma.pin(acc)
        wgmma.order_registers()
        matrix = wgmma.SmemMatrix.of(weights, problem.weights_columns)
        operands = [
            matrix.depth_along_columns(problem.weights_tile, step) for step in range(_DEPTH_STEPS)
        ]
        return _accumulate(acc, operands, values, side, problem)

    return lower(acc, weights_smem, values_smem)


def finish_products(in_flight: int, *arrays: Any) -> list[Any]:
    """Waits until at most `in_flight` of the newest groups are running; returns the arrays."""
    types = [ptx.array_type(array.shape, jnp.float32, MATRIX) for array in arrays]

    @ptx.inline(*[MATRIX] * len(arrays), returns=types)
    def lower(_, *arrays):
        wgmma.wait(in_flight)
        return wgmma.pin(*arrays) if arrays else []

    return lower(*arrays)


# --- Rows: votes, sums, handover ----------------------------------------------------------


def any_row(condition: Any) -> Any:
    """1 if the condition holds in a row of the calling warp (interpreter: of the tile)."""

    @ptx.inline(ROW, returns=ptx.SCALAR_I32)
    def lower(_, condition):
        first, second = registers.row_values(condition)
        return ptx.splat(registers.any_in_warp(arith.ori(first, second)))

    return lower(condition)


def row_partial_sums(matrix: Any) -> Any:
    """Sums over the columns that a thread holds: quad_sum of the result is the row's sum."""

    @ptx.inline(MATRIX, returns=_ROWS)
    def lower(_, matrix):
        sums = []
        for half in range(registers.ROW_HALVES):
            values = [
                registers.element(registers.pair(matrix, group, half), position)
                for group in range(matrix.shape[1] // registers.COLUMNS_PER_REGISTER_PAIR)
                for position in range(2)
            ]
            total = values[0]
            for value in values[1:]:
                total = arith.addf(total, value)
            sums.append(total)
        return registers.rows_of(sums)

    return lower(matrix)


def quad_sum(rows: Any) -> Any:
    """Adds up what the threads of a row hold of it."""

    @ptx.inline(ROW, returns=_ROWS)
    def lower(_, rows):
        return registers.rows_of([registers.quad_sum(v) for v in registers.row_values(rows)])

    return lower(rows)


def _box_address(box: ir.Value) -> ir.Value:
    return ptx.plus(ptx.smem_address(box), ptx.times(ptx.thread(), registers.ROW_HALVES * 4))


def put_rows(box_smem: Any, rows: Any) -> None:
    """Leaves a value per row for the other consumer, who holds the same rows per thread."""

    @ptx.inline(_REF, ROW)
    def lower(_, box, rows):
        values = registers.row_values(rows)
        ptx.asm("st.shared.v2.f32 [$0], {$1, $2};", [_box_address(box), *values], "r,f,f")

    lower(box_smem, rows)


def get_rows(box_smem: Any) -> Any:
    @ptx.inline(_REF, returns=_ROWS)
    def lower(_, box):
        text = "ld.shared.v2.f32 {$0, $1}, [$2];"
        both = ptx.asm(text, [_box_address(box)], "=f,=f,r", ptx.struct(ptx.f32(), 2))
        return registers.rows_of(ptx.unpack(both, ptx.f32(), 2))

    return lower(box_smem)


def store_weights(place_smem: Any, weights: Any) -> None:
    """Stores weights [64, 64] where the tensor core can read them."""

    @ptx.inline(_MATMUL_REF, MATRIX)
    def lower(_, place, weights):
        weights.store_tiled(place, swizzle=128)

    lower(place_smem, weights)


# --- Results ------------------------------------------------------------------------------


def store_output(out_gmem: Any, out: Any) -> None:
    """Writes [64, 256] bfloat16, 16 bytes to a thread, so that sectors are written whole."""

    @ptx.inline(_REF, MATRIX)
    def lower(_, ref, out):
        (row_stride, column_stride), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        assert column_stride == 1
        address = ptx.plus(
            ptx.gmem_address(ref),
            ptx.times(registers.row_in_warpgroup(), row_stride * _BF16),
            ptx.times(registers.lane_in_quad(), _CHUNK),
        )
        groups_per_store = 4
        for group in range(
            0, out.shape[1] // registers.COLUMNS_PER_REGISTER_PAIR, groups_per_store
        ):
            for half in range(registers.ROW_HALVES):
                words = [registers.word(out, group + i, half) for i in range(groups_per_store)]
                offset = half * 8 * row_stride * _BF16 + group * 8 * _BF16
                ptx.asm(
                    f"st.global.cs.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};",
                    [address, *registers.quad_transpose(words)],
                    "l,r,r,r,r",
                )

    lower(out_gmem, out)


def store_rows(rows_gmem: Any, rows: Any) -> None:
    """Writes one float32 per row."""

    @ptx.inline(_REF, ROW)
    def lower(_, ref, rows):
        address = ptx.plus(ptx.gmem_address(ref), ptx.times(registers.row_in_warpgroup(), 4))
        first_lane = ptx.as_i32(ptx.equals(registers.lane_in_quad(), 0))
        for half, value in enumerate(registers.row_values(rows)):
            ptx.asm(
                "{ .reg .pred first; setp.ne.s32 first, $2, 0; "
                f"@first st.global.f32 [$0+{half * 8 * 4}], $1; }}",
                [address, value, first_lane],
                "l,f,r",
            )

    lower(rows_gmem, rows)
