"""Keys out of pages of float8 tokens: loaded ahead into registers, widened when there is room.

Four threads share a key, and a thread serves two keys of a block. Of a tile of 64 columns each
takes 16 codes, so that they load 64 bytes that lie side by side, and stores 32 bytes of
bfloat16. What a thread holds of some tiles is opaque to the kernel's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from jax_impl.kv_cache.formats import FORMATS
from jax_impl.mosaic import float8, ptx, registers
from jax_impl.mosaic.layouts import QUAD_KEY, SCALAR, TILE_BYTES, TILE_COLUMNS, threads_per_key
from jax_impl.mosaic.ptx import BF16_BYTES, MATMUL_REF, REF
from jax_impl.prefill.kernel_sm90.problem import BLOCK_KEYS, D_V, Problem

_LAYOUT = FORMATS["v4-fp8"]
assert _LAYOUT.quantised is not None
_CODES, _SCALES, _PLAIN = _LAYOUT.quantised.codes, _LAYOUT.quantised.scales, _LAYOUT.plain
# What the instructions below count on: one scale to a tile, 64-byte pieces at multiples of 16.
assert _LAYOUT.quantised.group == TILE_COLUMNS and _LAYOUT.quantised.scale_kind == "ue8m0"
assert _CODES.region == _PLAIN.region != _SCALES.region and _SCALES.offset == 0
CODE_TILES = range(_CODES.size // TILE_COLUMNS)
PLAIN_TILE = len(CODE_TILES)
assert _PLAIN.size == TILE_COLUMNS * BF16_BYTES and D_V == (PLAIN_TILE + 1) * TILE_COLUMNS

_SHARERS = threads_per_key(QUAD_KEY)
_KEYS_PER_STEP = ptx.WARPGROUP // _SHARERS
_STEPS = BLOCK_KEYS // _KEYS_PER_STEP
_PIECE = 16  # bytes that a thread loads, or stores, at a time
_WORDS = _PIECE // 4
_TILE_ROW = TILE_COLUMNS * BF16_BYTES
_ROWS_PER_TILE = TILE_BYTES // _TILE_ROW
_SCALES_PER_THREAD = 2
_LARGE_SCALE = 0x80  # bytes with this bit are scales of 2 and more
_INT32_MAX = 2**31 - 1
_NOWHERE = 2**31 - 1  # the upper half of a hole's address
_LANES_OF_QUAD = 0x1C1F  # of shfl: neighbouring four


def _lane() -> ir.Value:
    """Which of the four threads that share a key this one is."""
    return ptx.bits(ptx.thread(), _SHARERS - 1)


def _key_in_step() -> ir.Value:
    return ptx.shift_right(ptx.thread(), _SHARERS.bit_length() - 1)


class _Token(NamedTuple):
    """Where a key lies in global memory: addresses, meaningless for a hole."""

    data: ir.Value  # its share of the first region of its page
    scales: ir.Value
    slot: ir.Value  # negative for a hole


def _tokens(caches: Sequence[ir.Value], slots: Any, problem: Problem) -> list[_Token]:
    """This thread's keys of a block."""
    return [_token(caches, slot, problem) for slot in registers.key_values(slots)]


def _token(caches: Sequence[ir.Value], slot: ir.Value, problem: Problem) -> _Token:
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
    return _Token(
        data=ptx.plus(page_start, ptx.times(token, _LAYOUT.token_stride(_CODES))),
        scales=ptx.plus(page_start, first_scale, ptx.times(token, _LAYOUT.token_stride(_SCALES))),
        slot=slot,
    )


def _in_cache(slot: ir.Value, problem: Problem, number: int) -> list[ir.Value]:
    """Page, token in it, page stride and where a page's scales begin, for a slot of a cache."""
    size = problem.pages[number].page_size
    if size & (size - 1):
        page, token = arith.divui(slot, ptx.constant(size)), arith.remui(slot, ptx.constant(size))
    else:
        page, token = ptx.shift_right(slot, size.bit_length() - 1), ptx.bits(slot, size - 1)
    sizes = (_LAYOUT.page_stride(size), _LAYOUT.first_byte(_SCALES, size))
    return [page, token, *map(ptx.constant, sizes)]


def _load(address: ir.Value, offset: int, exists: ir.Value, l2_prefetch: str) -> list[ir.Value]:
    """16 bytes, or zeros where `exists` is 0."""
    prefetch = f".L2::{l2_prefetch}" if l2_prefetch else ""
    # Keys are read by several tiles, everything else once.
    policy = ptx.asm(
        "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", [], "=l", ptx.i64(), pure=True
    )
    words = ptx.asm(
        "{ .reg .pred exists; setp.ne.s32 exists, $5, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        f"@exists ld.global.L1::no_allocate.L2::cache_hint{prefetch}.v4.b32 "
        f"{ptx.names(0, _WORDS)}, [$4+{offset}], $6; }}",
        [address, exists, policy],
        "=&r,=&r,=&r,=&r,l,r,l",
        ptx.struct(ptx.i32(), _WORDS),
    )
    return ptx.unpack(words, ptx.i32(), _WORDS)


def _is_key(slot: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.sge, slot, ptx.constant(0))


def locate(caches_gmem: Sequence[Any], slots: Any, problem: Problem) -> Any:
    """Where the keys of a block lie; opaque, for load_columns.

    slots [64] int32: the keys' slots, negative for holes.
    """
    returns = registers.words_type(2 * _STEPS)

    @ptx.inline(*[REF] * len(caches_gmem), QUAD_KEY, returns=returns)
    def lower(_, *arguments):
        *caches, slots = arguments
        own_piece = ptx.times(_lane(), _PIECE)
        words = []
        for token in _tokens(caches, slots, problem):
            low, high = _halves(ptx.plus(token.data, own_piece))
            words += [low, arith.select(_is_key(token.slot), high, ptx.constant(_NOWHERE))]
        return registers.array_of_words(words)

    return lower(*caches_gmem, slots)


def _halves(address: ir.Value) -> tuple[ir.Value, ir.Value]:
    upper = arith.shrui(address, ptx.constant(32, ptx.i64()))
    return arith.trunci(ptx.i32(), address), arith.trunci(ptx.i32(), upper)


def _address(low: ir.Value, high: ir.Value) -> ir.Value:
    return ptx.asm("mov.b64 $0, {$1, $2};", [low, high], "=l,r,r", ptx.i64(), pure=True)


def load_scales(caches_gmem: Sequence[Any], slots: Any, problem: Problem) -> Any:
    """Starts loading the scales of a block's keys; opaque, for scale_factors."""

    @ptx.inline(*[REF] * len(caches_gmem), QUAD_KEY, returns=registers.words_type(_STEPS))
    def lower(_, *arguments):
        *caches, slots = arguments
        offset = ptx.times(_lane(), _SCALES_PER_THREAD)
        return registers.array_of_words(
            [
                ptx.asm(
                    "{ .reg .pred exists; setp.ge.s32 exists, $2, 0; mov.b32 $0, 0; "
                    "@exists ld.global.nc.u16 $0, [$1]; }",
                    [ptx.plus(token.scales, offset), token.slot],
                    "=&r,l,r",
                    ptx.i32(),
                )
                for token in _tokens(caches, slots, problem)
            ]
        )

    return lower(*caches_gmem, slots)


def load_columns(
    caches_gmem: Sequence[Any],
    places: Any,
    tiles: Sequence[int],
    after: Any,
    problem: Problem,
    l2_prefetch: str,
) -> Any:
    """Starts loading some 64-column tiles of a block's keys; opaque.

    places: of locate. after: what any_unusual has returned; nothing is asked for before it is
    known.
    """
    del caches_gmem, problem  # the interpreter reads here
    counts = [2 if tile == PLAIN_TILE else 1 for tile in tiles]
    returns = [registers.words_type(_WORDS)] * (sum(counts) * _STEPS)

    @ptx.inline(registers.words_layout(2 * _STEPS), SCALAR, returns=returns)
    def lower(_, places, after):
        # No address is as high as this limit: whether `after` is 0 or 1 makes no difference,
        # but it has to be known.
        limit = arith.subi(ptx.constant(_NOWHERE), ptx.scalar(after))
        halves = registers.words_of(places)
        loaded = []
        for tile in tiles:
            is_plain = tile == PLAIN_TILE
            offset = _PLAIN.offset if is_plain else _CODES.offset + tile * TILE_COLUMNS
            further = _plain_offsets() if is_plain else [ptx.constant(0)]
            for low, high in zip(halves[::2], halves[1::2], strict=True):
                exists = ptx.as_i32(arith.cmpi(arith.CmpIPredicate.slt, high, limit))
                address = _address(low, high)
                loaded += [
                    _load(ptx.plus(address, piece), offset, exists, l2_prefetch)
                    for piece in further
                ]
        ptx.asm("bar.warp.sync 0xffffffff;")
        return [registers.array_of_words(words) for words in loaded]

    return lower(places, after)


def _plain_pieces() -> list[ir.Value]:
    """The two 16-byte pieces of a row of bfloat16 columns that this thread moves, in order.

    Keys with even numbers begin with the first four, those with odd numbers with the last: eight
    threads then store eight different pieces.
    """
    odd = ptx.bits(_key_in_step(), 1)
    first = ptx.plus(_lane(), ptx.times(odd, _SHARERS))
    return [first, arith.xori(first, ptx.constant(_SHARERS))]


def _plain_offsets() -> list[ir.Value]:
    """The same pieces, in bytes from the one of this thread's number."""
    four = _SHARERS * _PIECE
    first = ptx.times(ptx.bits(_key_in_step(), 1), four)
    return [first, arith.xori(first, ptx.constant(four))]


def scale_factors(scales: Any) -> tuple[Any, Any]:
    """What a block's codes are multiplied by, and what there is for note_unusual."""
    returns = [registers.words_type(_STEPS * _SCALES_PER_THREAD), registers.words_type(1)]

    @ptx.inline(registers.words_layout(_STEPS), returns=returns)
    def lower(_, scales):
        # The last thread of four has one scale, and a byte of padding that may hold anything.
        is_last = ptx.equals(_lane(), _SHARERS - 1)
        large = _LARGE_SCALE * 0x101
        relevant = arith.select(is_last, ptx.constant(_LARGE_SCALE), ptx.constant(large))
        factors, unusual = [], ptx.constant(0)
        for both in registers.words_of(scales):
            both = registers.shuffle_xor(both, 0)  # used from here on, and waited for no earlier
            unusual = arith.ori(unusual, arith.andi(both, relevant))
            for byte in (ptx.bits(both, 0xFF), ptx.shift_right(both, 8)):
                factors.append(float8.moved_factor(byte))
        return [registers.array_of_words(factors), registers.array_of_words([unusual])]

    return lower(scales)


def note_unusual(loaded: Sequence[Any], tiles: Sequence[int], unusual: Any) -> Any:
    """`unusual`, with what there is among some loaded tiles that store_columns gets wrong."""
    types = [registers.words_layout(_WORDS)] * len(loaded) + [registers.words_layout(1)]

    @ptx.inline(*types, returns=registers.words_type(1))
    def lower(_, *arguments):
        *loaded, unusual = arguments
        (noted,) = registers.words_of(unusual)
        pieces = iter(map(registers.words_of, loaded))
        for tile in tiles:
            for _ in range(_STEPS * (2 if tile == PLAIN_TILE else 1)):
                words = next(pieces)
                if tile == PLAIN_TILE:  # looked at only to be waited for
                    noted = float8.note_nothing(noted, words[0])
                    continue
                for word in words:
                    noted = float8.note_nan_codes(noted, word)
        return registers.array_of_words([noted])

    return lower(*loaded, unusual)


def any_unusual(unusual: Any) -> Any:
    """1 if anything was noted in the calling warp: a case for store_exactly.

    Known when everything that was looked at has arrived.
    """

    @ptx.inline(registers.words_layout(1), returns=ptx.SCALAR_I32)
    def lower(_, unusual):
        (noted,) = registers.words_of(unusual)
        return ptx.splat(float8.any_noted_in_warp(noted))

    return lower(unusual)


def store_columns(
    kv_smem: Any,
    slot: int,
    tiles: Sequence[int],
    loaded: Sequence[Any],
    factors: Any,
    problem: Problem,
) -> None:
    """Stores what load_columns has brought, widened, for the tensor core.

    Wrong for what note_unusual notes: NaN codes, and scales of 2 and more.
    """
    types = [MATMUL_REF, *[registers.words_layout(_WORDS)] * len(loaded)]
    types += [registers.words_layout(_STEPS * _SCALES_PER_THREAD)]

    @ptx.inline(*types)
    def lower(_, kv_smem, *arguments):
        *loaded, factors = arguments
        pieces = iter(map(registers.words_of, loaded))
        factors = registers.words_of(factors)
        place = _Place.of(kv_smem, slot, problem)
        for tile in tiles:
            for step in range(_STEPS):
                if tile == PLAIN_TILE:
                    for piece in _plain_pieces():
                        place.store(step, tile, piece, next(pieces))
                    continue
                factor = _of_thread(
                    tile // _SCALES_PER_THREAD,
                    factors[step * _SCALES_PER_THREAD + tile % _SCALES_PER_THREAD],
                )
                words = next(pieces)
                widened = [half for word in words for half in float8.moved(word, factor)]
                place.store_codes(step, tile, widened)

    lower(kv_smem, *loaded, factors)


class _Place(NamedTuple):
    """One slot of shared memory: tiles of 8 keys by 64 columns, pieces permuted by the key."""

    row: ir.Value  # address of this thread's first key in the first tile
    key_in_tile: ir.Value
    step_bytes: int

    @classmethod
    def of(cls, kv_smem: ir.Value, slot: int, problem: Problem) -> _Place:
        key = _key_in_step()
        key_in_tile = ptx.bits(key, _ROWS_PER_TILE - 1)
        tile_row_bytes = problem.column_tiles * TILE_BYTES
        row = ptx.plus(
            ptx.smem_address(kv_smem),
            slot * BLOCK_KEYS // _ROWS_PER_TILE * tile_row_bytes,
            ptx.times(ptx.shift_right(key, _ROWS_PER_TILE.bit_length() - 1), tile_row_bytes),
            ptx.times(key_in_tile, _TILE_ROW),
        )
        return cls(row, key_in_tile, _KEYS_PER_STEP // _ROWS_PER_TILE * tile_row_bytes)

    def store(self, step: int, tile: ir.Value | int, piece: ir.Value, words: Any) -> None:
        permuted = ptx.times(arith.xori(piece, self.key_in_tile), _PIECE)
        offset = step * self.step_bytes
        if isinstance(tile, int):
            offset += tile * TILE_BYTES
            address = ptx.plus(self.row, permuted)
        else:
            address = ptx.plus(self.row, permuted, ptx.times(tile, TILE_BYTES))
        ptx.asm(
            f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};", [address, *words], "r,r,r,r,r"
        )

    def store_codes(self, step: int, tile: ir.Value | int, widened: Sequence[ir.Value]) -> None:
        """What this thread's 16 codes of a tile have become: two pieces side by side."""
        for half in range(2):
            piece = ptx.plus(ptx.times(_lane(), 2), half)
            self.store(step, tile, piece, widened[half * _WORDS : (half + 1) * _WORDS])


def _of_thread(number: int, value: ir.Value) -> ir.Value:
    """The value that one of the four threads of a key has."""
    return ptx.asm(
        f"shfl.sync.idx.b32 $0, $1, {number}, {_LANES_OF_QUAD:#x}, 0xffffffff;",
        [value],
        "=r,r",
        ptx.i32(),
    )


def store_exactly(
    kv_smem: Any,
    slot: int,
    tiles: Sequence[int],
    caches_gmem: Sequence[Any],
    slots: Any,
    problem: Problem,
) -> None:
    """Loads some tiles of a block's keys and stores them widened, whatever there is among them.

    Slowly, and without holding on to anything meanwhile: cases are rare.
    """

    @ptx.inline(MATMUL_REF, *[REF] * len(caches_gmem), QUAD_KEY)
    def lower(_, kv_smem, *arguments):
        *caches, slots = arguments
        place = _Place.of(kv_smem, slot, problem)
        own = [_anew(value) for value in registers.key_values(slots)]
        codes = [tile for tile in tiles if tile in CODE_TILES]
        end = ptx.constant(codes[-1] + 1)
        loop = scf.ForOp(ptx.constant(codes[0]), end, ptx.constant(1))
        with ir.InsertionPoint(loop.body):
            tile = loop.induction_variable
            offset = ptx.plus(ptx.times(tile, TILE_COLUMNS), ptx.times(_lane(), _PIECE))
            for step, own_slot in enumerate(own):
                token = _token(caches, own_slot, problem)
                exists = ptx.as_i32(_is_key(own_slot))
                words = _load(ptx.plus(token.data, offset), _CODES.offset, exists, "")
                scale = float8.ue8m0_scale(_load_byte(ptx.plus(token.scales, tile), own_slot))
                widened = [half for word in words for half in float8.widened(word, scale)]
                place.store_codes(step, tile, widened)
            scf.yield_([])
        if PLAIN_TILE in tiles:
            for step, own_slot in enumerate(own):
                token = _token(caches, own_slot, problem)
                exists = ptx.as_i32(_is_key(own_slot))
                for piece in _plain_pieces():
                    data = ptx.plus(token.data, ptx.times(piece, _PIECE))
                    words = _load(data, _PLAIN.offset, exists, "")
                    place.store(step, PLAIN_TILE, piece, words)

    lower(kv_smem, *caches_gmem, slots)


def _anew(value: ir.Value) -> ir.Value:
    """The same value, of which nothing is kept in registers that was once made from it."""
    return ptx.asm("mov.b32 $0, $1;", [value], "=r,r", ptx.i32())


def _load_byte(address: ir.Value, slot: ir.Value) -> ir.Value:
    return ptx.asm(
        "{ .reg .pred exists; setp.ge.s32 exists, $2, 0; mov.b32 $0, 0; "
        "@exists ld.global.nc.u8 $0, [$1]; }",
        [address, slot],
        "=&r,l,r",
        ptx.i32(),
    )


def prefetch_page_rows(
    caches_gmem: Sequence[Any],
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
        # The threads of a key hold the same slots, one for each of them.
        assert len(own) == _SHARERS
        slot = own[0]
        for other in range(1, _SHARERS):
            slot = arith.select(ptx.equals(_lane(), other), own[other], slot)
        token = _token(caches, slot, problem)
        wanted = _is_key(slot)
        if sharers > 1:
            share = arith.remui(ptx.scalar(tile_number), ptx.constant(sharers))
            mine = arith.remui(_lane(), ptx.constant(sharers))
            wanted = arith.andi(wanted, arith.cmpi(arith.CmpIPredicate.eq, mine, share))
        ptx.asm(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $1, 0; "
            f"@wanted cp.async.bulk.prefetch.L2.global [$0], {_LAYOUT.token_stride(_CODES)}; }}",
            [token.data, ptx.as_i32(wanted)],
            "l,r",
        )

    lower(*caches_gmem, tile_number, *slots)
