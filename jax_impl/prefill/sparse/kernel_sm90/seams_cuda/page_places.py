"""Where keys of paged float8 tokens lie, and where their columns go in shared memory.

Four threads share a key, and a thread serves two keys of a block. Of a tile of 64 columns each
takes 16 codes, so that they load 64 bytes that lie side by side, and stores 32 bytes of bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_impl.kv_cache.formats import FORMATS
from jax_impl.mosaic import ptx, registers
from jax_impl.mosaic.blocks import BLOCK_KEYS
from jax_impl.mosaic.layouts import QUAD_KEY, SCALAR, TILE_BYTES, TILE_COLUMNS, Ref, threads_per_key
from jax_impl.mosaic.ptx import BF16_BYTES, REF
from jax_impl.prefill.sparse.kernel_sm90.problem import PLAIN_TILE, Problem

LAYOUT = FORMATS["v4-fp8"]
assert LAYOUT.quantised is not None
CODES, SCALES, PLAIN = LAYOUT.quantised.codes, LAYOUT.quantised.scales, LAYOUT.plain
# What the instructions count on: one scale to a tile, pieces of 64 bytes at multiples of 16,
# scales at multiples of 8.
assert LAYOUT.quantised.group == TILE_COLUMNS and LAYOUT.quantised.scale_kind == "ue8m0"
assert CODES.region == PLAIN.region != SCALES.region and SCALES.offset == 0
assert all(region % 8 == 0 for region in LAYOUT.regions)
assert CODES.size == PLAIN_TILE * TILE_COLUMNS and PLAIN.size == TILE_COLUMNS * BF16_BYTES

SHARERS = threads_per_key(QUAD_KEY)
_KEYS_PER_STEP = ptx.WARPGROUP // SHARERS
STEPS = BLOCK_KEYS // _KEYS_PER_STEP  # keys of a block that a thread serves
PIECE = 16  # bytes that a thread moves at a time
WORDS = PIECE // 4
_TILE_ROW = TILE_COLUMNS * BF16_BYTES
_ROWS_PER_TILE = TILE_BYTES // _TILE_ROW
NOWHERE = 2**31 - 1  # the upper half of a hole's address


class Worker(NamedTuple):
    """What a thread does: its number among those of a key, and its first key."""

    lane: ir.Value
    key: ir.Value

    @classmethod
    def own(cls) -> Worker:
        return cls._of(ptx.thread())

    @classmethod
    def anew(cls) -> Worker:
        """Nothing that is made from it is kept in registers elsewhere."""
        return cls._of(ptx.anew(ptx.thread()))

    @classmethod
    def _of(cls, thread: ir.Value) -> Worker:
        key = ptx.shift_right(thread, SHARERS.bit_length() - 1)
        return cls(ptx.bits(thread, SHARERS - 1), key)


class Token(NamedTuple):
    """Where a key lies in global memory: addresses, meaningless for a hole."""

    data: ir.Value  # its share of the first region of its page
    scales: ir.Value
    slot: ir.Value  # negative for a hole


def token_of(caches: Sequence[ir.Value], slot: ir.Value, problem: Problem) -> Token:
    first = _in_cache(slot, problem, 0)
    base = ptx.gmem_address(caches[0])
    if len(caches) == 2:
        boundary = ptx.constant(problem.pages[0].num_slots)
        is_second = arith.cmpi(arith.CmpIPredicate.sge, slot, boundary)
        second = _in_cache(arith.subi(slot, boundary), problem, 1)
        first = [arith.select(is_second, b, a) for a, b in zip(first, second, strict=True)]
        base = arith.select(is_second, ptx.gmem_address(caches[1]), base)
    page, token, stride, first_scale = first
    page_start = ptx.plus(base, arith.muli(ptx.wide(page), ptx.wide(stride)))
    return Token(
        data=ptx.plus(page_start, ptx.times(token, LAYOUT.token_stride(CODES))),
        scales=ptx.plus(page_start, first_scale, ptx.times(token, LAYOUT.token_stride(SCALES))),
        slot=slot,
    )


def _in_cache(slot: ir.Value, problem: Problem, number: int) -> list[ir.Value]:
    """Page, token in it, page stride and where a page's scales begin, for a slot of a cache."""
    size = problem.pages[number].page_size
    if size & (size - 1):
        page, token = arith.divui(slot, ptx.constant(size)), arith.remui(slot, ptx.constant(size))
    else:
        page, token = ptx.shift_right(slot, size.bit_length() - 1), ptx.bits(slot, size - 1)
    sizes = (LAYOUT.page_stride(size), LAYOUT.first_byte(SCALES, size))
    return [page, token, *map(ptx.constant, sizes)]


def is_key(slot: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.sge, slot, ptx.constant(0))


def locate(caches_gmem: Sequence[Ref], slots: Any, problem: Problem) -> Any:
    """Where the keys of a block lie; opaque, for load_columns and copy_plain.

    slots [64] int32: the keys' slots, negative for holes.
    """
    returns = registers.words_type(2 * STEPS)

    @ptx.inline(*[REF] * len(caches_gmem), QUAD_KEY, returns=returns)
    def lower(_, *arguments):
        *caches, slots = arguments
        own_piece = ptx.times(Worker.own().lane, PIECE)
        words = []
        for slot in registers.key_values(slots):
            low, high = _halves(ptx.plus(token_of(caches, slot, problem).data, own_piece))
            words += [low, arith.select(is_key(slot), high, ptx.constant(NOWHERE))]
        return registers.array_of_words(words)

    return lower(*caches_gmem, slots)


def _halves(address: ir.Value) -> tuple[ir.Value, ir.Value]:
    upper = arith.shrui(address, ptx.constant(32, ptx.i64()))
    return arith.trunci(ptx.i32(), address), arith.trunci(ptx.i32(), upper)


class Located(NamedTuple):
    """A key of locate."""

    low: ir.Value
    high: ir.Value

    def exists(self, limit: ir.Value) -> ir.Value:
        """limit: an address half beyond all others, NOWHERE or a little less."""
        return ptx.as_i32(arith.cmpi(arith.CmpIPredicate.slt, self.high, limit))

    @property
    def address(self) -> ir.Value:
        """Of the first of the pieces that this thread takes of each 64 bytes."""
        halves = [self.low, self.high]
        return ptx.asm("mov.b64 $0, {$1, $2};", halves, "=l,r,r", ptx.i64(), pure=True)


def located(places: Any) -> list[Located]:
    words = registers.words_of(places)
    return [Located(*halves) for halves in zip(words[::2], words[1::2], strict=True)]


class Place(NamedTuple):
    """One slot of shared memory: tiles of 8 keys by 64 columns, pieces permuted by the key."""

    row: ir.Value  # address of this thread's first key in the first tile
    key_in_tile: ir.Value
    step_bytes: int
    worker: Worker

    @classmethod
    def of(cls, kv_smem: ir.Value, slot: int, worker: Worker, problem: Problem) -> Place:
        key_in_tile = ptx.bits(worker.key, _ROWS_PER_TILE - 1)
        tile_row_bytes = problem.column_tiles * TILE_BYTES
        tile_row = ptx.shift_right(worker.key, _ROWS_PER_TILE.bit_length() - 1)
        row = ptx.plus(
            ptx.smem_address(kv_smem),
            slot * BLOCK_KEYS // _ROWS_PER_TILE * tile_row_bytes,
            ptx.times(tile_row, tile_row_bytes),
            ptx.times(key_in_tile, _TILE_ROW),
        )
        return cls(row, key_in_tile, _KEYS_PER_STEP // _ROWS_PER_TILE * tile_row_bytes, worker)

    def of_piece(self, piece: ir.Value) -> ir.Value:
        """Address of a piece of 16 bytes of the first key in the first tile."""
        return ptx.plus(self.row, ptx.times(arith.xori(piece, self.key_in_tile), PIECE))

    def offset(self, step: int, tile: int) -> int:
        """From there to another of this thread's keys, and another tile."""
        return step * self.step_bytes + tile * TILE_BYTES

    def moved_to(self, step: ir.Value, tile: ir.Value) -> Place:
        """The same, known only while running: what is step 0 and tile 0 of the result."""
        offsets = ptx.times(step, self.step_bytes), ptx.times(tile, TILE_BYTES)
        return self._replace(row=ptx.plus(self.row, *offsets))

    def store_codes(self, step: int, tile: int, widened: Sequence[ir.Value]) -> None:
        """What this thread's 16 codes of a tile have become: two pieces side by side."""
        for half in range(2):
            address = self.of_piece(ptx.plus(ptx.times(self.worker.lane, 2), half))
            ptx.asm(
                f"st.shared.v4.b32 [$0+{self.offset(step, tile)}], {{$1, $2, $3, $4}};",
                [address, *widened[half * WORDS : (half + 1) * WORDS]],
                "r,r,r,r,r",
            )


def prefetch_page_rows(
    caches_gmem: Sequence[Ref],
    slots: Sequence[Any],
    tile_number: Any,
    sharers: int,
    problem: Problem,
) -> None:
    """Asks L2 for this tile's share of the keys of a pair of blocks.

    `sharers` tiles of consecutive numbers need the same keys; each asks for every `sharers`-th.
    """

    @ptx.inline(*[REF] * len(caches_gmem), SCALAR, *[QUAD_KEY] * len(slots))
    def lower(_, *arguments):
        caches = arguments[: len(caches_gmem)]
        tile_number, *slots = arguments[len(caches_gmem) :]
        own = [value for array in slots for value in registers.key_values(array)]
        lane = Worker.own().lane
        # The threads of a key hold the same slots, one for each of them.
        assert len(own) == SHARERS
        slot = own[0]
        for other in range(1, SHARERS):
            slot = arith.select(ptx.equals(lane, other), own[other], slot)
        token = token_of(caches, slot, problem)
        wanted = is_key(slot)
        if sharers > 1:
            share = arith.remui(ptx.scalar(tile_number), ptx.constant(sharers))
            mine = arith.remui(lane, ptx.constant(sharers))
            wanted = arith.andi(wanted, arith.cmpi(arith.CmpIPredicate.eq, mine, share))
        ptx.asm(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $1, 0; "
            f"@wanted cp.async.bulk.prefetch.L2.global [$0], {LAYOUT.token_stride(CODES)}; }}",
            [token.data, ptx.as_i32(wanted)],
            "l,r",
        )

    lower(*caches_gmem, tile_number, *slots)
