"""Keys out of pages of float8 tokens: loaded ahead into registers, widened when there is room.

What a thread holds of some tiles is opaque to the kernel's body. Columns that are bfloat16 in
the pages are copied past the registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from jax_impl.mosaic import float8, ptx, registers
from jax_impl.mosaic.layouts import QUAD_KEY, TILE_COLUMNS, Ref
from jax_impl.mosaic.ptx import MATMUL_REF, REF
from jax_impl.prefill.sparse.kernel_sm90.problem import PLAIN_TILE, Problem
from jax_impl.prefill.sparse.kernel_sm90.seams_cuda.page_places import (
    CODES,
    NOWHERE,
    PIECE,
    PLAIN,
    SHARERS,
    STEPS,
    WORDS,
    Located,
    Place,
    Worker,
    located,
    token_of,
)

_SCALE_WORDS = 2  # a key's scales, and a byte of padding that may hold anything
_NO_SCALES = 0x01010101  # a hole's: nothing unusual, and its codes are 0
_SIGNS = (0x80808080, 0x00808080)  # bytes with such a bit are scales of 2 and more


def _load(address: ir.Value, offset: int, exists: ir.Value, l2_prefetch: str) -> list[ir.Value]:
    """16 bytes, or zeros where `exists` is 0."""
    words = ptx.asm(
        "{ .reg .pred exists; setp.ne.s32 exists, $5, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        f"@exists ld.global.L1::no_allocate.L2::cache_hint{_prefetch(l2_prefetch)}.v4.b32 "
        f"{ptx.names(0, WORDS)}, [$4+{offset}], $6; }}",
        [address, exists, _keep_in_l2()],
        "=&r,=&r,=&r,=&r,l,r,l",
        ptx.struct(ptx.i32(), WORDS),
    )
    return ptx.unpack(words, ptx.i32(), WORDS)


def _prefetch(size: str) -> str:
    return f".L2::{size}" if size else ""


def _keep_in_l2() -> ir.Value:
    """Keys are read by several tiles, everything else once."""
    text = "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;"
    return ptx.asm(text, [], "=l", ptx.i64(), pure=True)


def load_scales(
    caches_gmem: Sequence[Ref], slots: Any, places: Any, after: Any, problem: Problem
) -> Any:
    """Starts loading the scales of a block's keys; opaque. places, after: as of load_columns."""
    returns = registers.words_type(_SCALE_WORDS * STEPS)
    types = [QUAD_KEY, registers.words_layout(2 * STEPS), registers.words_layout(1)]

    @ptx.inline(*[REF] * len(caches_gmem), *types, returns=returns)
    def lower(_, *arguments):
        *caches, slots, places, after = arguments
        limit = _limit(after)
        words = []
        for slot, key in zip(registers.key_values(slots), located(places), strict=True):
            both = ptx.asm(
                "{ .reg .pred exists; setp.ne.s32 exists, $3, 0; "
                f"mov.b32 $0, {_NO_SCALES}; mov.b32 $1, {_NO_SCALES}; "
                "@exists ld.global.nc.v2.b32 {$0, $1}, [$2]; }",
                [token_of(caches, slot, problem).scales, key.exists(limit)],
                "=&r,=&r,l,r",
                ptx.struct(ptx.i32(), _SCALE_WORDS),
            )
            words += ptx.unpack(both, ptx.i32(), _SCALE_WORDS)
        return registers.array_of_words(words)

    return lower(*caches_gmem, slots, places, after)


def _limit(after: Any) -> ir.Value:
    """Above all addresses. Whether `after` is 0 or 1 makes no difference, but it must be known."""
    (after,) = registers.words_of(after)
    return arith.subi(ptx.constant(NOWHERE), after)


def load_columns(
    caches_gmem: Sequence[Ref],
    places: Any,
    tiles: Sequence[int],
    after: Any,
    problem: Problem,
    l2_prefetch: str,
) -> Any:
    """Starts loading some 64-column tiles of codes of a block's keys; opaque.

    places: of locate. after: of arrived; nothing is asked for before it is known.
    """
    del caches_gmem, problem  # the interpreter reads here
    returns = [registers.words_type(WORDS)] * (len(tiles) * STEPS)

    @ptx.inline(registers.words_layout(2 * STEPS), registers.words_layout(1), returns=returns)
    def lower(_, places, after):
        limit = _limit(after)
        loaded = [
            _load(key.address, CODES.offset + tile * TILE_COLUMNS, key.exists(limit), l2_prefetch)
            for tile in tiles
            for key in located(places)
        ]
        ptx.asm("bar.warp.sync 0xffffffff;")
        return [registers.array_of_words(words) for words in loaded]

    return lower(places, after)


def copy_plain(
    caches_gmem: Sequence[Ref],
    kv_smem: Ref,
    slot: int,
    places: Any,
    problem: Problem,
    l2_prefetch: str,
) -> None:
    """Starts the copy of the columns that are bfloat16 in the pages; zeros for holes."""

    @ptx.inline(REF, MATMUL_REF, registers.words_layout(2 * STEPS))
    def lower(_, cache, kv_smem, places):
        worker = Worker.own()
        place = Place.of(kv_smem, slot, worker, problem)
        policy = _keep_in_l2()
        for half in range(2):
            target = place.of_piece(ptx.plus(worker.lane, half * SHARERS))
            for step, key in enumerate(located(places)):
                exists = arith.cmpi(arith.CmpIPredicate.slt, key.high, ptx.constant(NOWHERE))
                source = arith.select(exists, key.address, ptx.gmem_address(cache))
                size = arith.select(exists, ptx.constant(PIECE), ptx.constant(0))
                ptx.asm(
                    f"cp.async.cg.shared.global.L2::cache_hint{_prefetch(l2_prefetch)} "
                    f"[$0+{place.offset(step, PLAIN_TILE)}], "
                    f"[$1+{PLAIN.offset + half * SHARERS * PIECE}], {PIECE}, $2, $3;",
                    [target, source, size, policy],
                    "r,l,r,l",
                )

    lower(caches_gmem[0], kv_smem, places)


def unusual_scales(scales: Any) -> Any:
    """What there is among a block's scales that store_columns gets wrong, for note_unusual."""

    @ptx.inline(registers.words_layout(_SCALE_WORDS * STEPS), returns=registers.words_type(1))
    def lower(_, scales):
        noted = ptx.constant(0)
        for number, word in enumerate(registers.words_of(scales)):
            signs = ptx.constant(_SIGNS[number % _SCALE_WORDS])
            noted = arith.ori(noted, arith.andi(word, signs))
        return registers.array_of_words([noted])

    return lower(scales)


def arrived(loaded: Sequence[Any]) -> Any:
    """0 or 1, known when all that load_columns has asked for is there; opaque, for load_columns."""

    @ptx.inline(*[registers.words_layout(WORDS)] * len(loaded), returns=registers.words_type(1))
    def lower(_, *loaded):
        both = ptx.constant(0)
        for piece in loaded:
            both = arith.ori(both, registers.words_of(piece)[0])
        return registers.array_of_words([ptx.shift_right(both, 31)])

    return lower(*loaded)


def note_unusual(loaded: Sequence[Any], unusual: Any) -> Any:
    """`unusual`, with what there is among some loaded tiles that store_columns gets wrong."""
    types = [registers.words_layout(WORDS)] * len(loaded) + [registers.words_layout(1)]

    @ptx.inline(*types, returns=registers.words_type(1))
    def lower(_, *arguments):
        *loaded, unusual = arguments
        (noted,) = registers.words_of(unusual)
        for piece in loaded:
            for word in registers.words_of(piece):
                noted = float8.note_nan_codes(noted, word)
        return registers.array_of_words([noted])

    return lower(*loaded, unusual)


def any_unusual(unusual: Any) -> Any:
    """1 if anything was noted in the calling warp: a case for store_exactly."""

    @ptx.inline(registers.words_layout(1), returns=ptx.SCALAR_I32)
    def lower(_, unusual):
        (noted,) = registers.words_of(unusual)
        return ptx.splat(float8.any_noted_in_warp(noted))

    return lower(unusual)


def store_columns(
    kv_smem: Ref,
    slot: int,
    tiles: Sequence[int],
    loaded: Sequence[Any],
    scales: Any,
    problem: Problem,
) -> None:
    """Stores what load_columns has brought, widened, for the tensor core.

    Wrong for scales of 2 and more, which unusual_scales notes, and for NaN codes, which
    note_unusual notes.
    """
    types = [MATMUL_REF, *[registers.words_layout(WORDS)] * len(loaded)]

    @ptx.inline(*types, registers.words_layout(_SCALE_WORDS * STEPS))
    def lower(_, kv_smem, *arguments):
        *loaded, scales = map(registers.words_of, arguments)
        pieces = iter(loaded)
        place = Place.of(kv_smem, slot, Worker.own(), problem)
        for tile in tiles:
            for step in range(STEPS):
                word = scales[step * _SCALE_WORDS + tile // 4]
                factor = float8.moved_factor(word, tile % 4)
                widened = [half for codes in next(pieces) for half in float8.moved(codes, factor)]
                place.store_codes(step, tile, widened)

    lower(kv_smem, *loaded, scales)


def store_exactly(
    kv_smem: Ref,
    slot: int,
    tiles: Sequence[int],
    caches_gmem: Sequence[Ref],
    places: Any,
    scales: Any,
    problem: Problem,
) -> None:
    """Loads some tiles of codes and stores them widened, whatever there is among them.

    Slowly, and without holding on to anything meanwhile: cases are rare.
    """
    del caches_gmem  # the interpreter reads here
    layouts = [registers.words_layout(count * STEPS) for count in (2, _SCALE_WORDS)]

    @ptx.inline(MATMUL_REF, *layouts)
    def lower(_, kv_smem, places, scales):
        place = Place.of(kv_smem, slot, Worker.anew(), problem)
        words = [*registers.words_of(places), *registers.words_of(scales)]
        end = ptx.constant(len(tiles) * STEPS)
        loop = scf.ForOp(ptx.constant(0), end, ptx.constant(1))
        with ir.InsertionPoint(loop.body):
            # One key after the other, of which little is in registers at a time.
            number = loop.induction_variable
            tile = ptx.plus(arith.divui(number, ptx.constant(STEPS)), tiles[0])
            step = arith.remui(number, ptx.constant(STEPS))
            low, high = _chosen(words[: 2 * STEPS], step)
            widened = _exactly(Located(low, high), tile, _chosen(words[2 * STEPS :], step))
            place.moved_to(step, tile).store_codes(0, 0, widened)
            scf.yield_([])

    lower(kv_smem, places, scales)


def _chosen(words: Sequence[ir.Value], step: ir.Value) -> list[ir.Value]:
    """Those of one of a thread's keys, of words that belong to all of them."""
    count = len(words) // STEPS
    chosen = list(words[:count])
    for other in range(1, STEPS):
        own = words[other * count : (other + 1) * count]
        is_own = ptx.equals(step, other)
        chosen = [arith.select(is_own, a, b) for a, b in zip(own, chosen, strict=True)]
    return chosen


def _exactly(key: Located, tile: ir.Value, scale_words: Sequence[ir.Value]) -> list[ir.Value]:
    exists = key.exists(ptx.constant(NOWHERE))
    address = ptx.plus(key.address, ptx.times(tile, TILE_COLUMNS))
    words = _load(address, CODES.offset, exists, "")
    scale = float8.ue8m0_scale(_byte(scale_words, tile))
    return [half for word in words for half in float8.widened(word, scale)]


def _byte(words: Sequence[ir.Value], number: ir.Value) -> ir.Value:
    low, high = words
    is_low = arith.cmpi(arith.CmpIPredicate.ult, number, ptx.constant(4))
    place = ptx.times(ptx.bits(number, 3), 8)
    return ptx.bits(arith.shrui(arith.select(is_low, low, high), place), 0xFF)
