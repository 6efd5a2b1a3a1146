"""The producer that reads pages: under Pallas' interpreter, and as a program for the GPU."""

from __future__ import annotations

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.prefill.sparse.kernel_sm90 import (
    PagedConfig,
    Pages,
    attend_pages,
    paged_producer,
    seams_interpret,
)
from jax_impl.prefill.sparse.kernel_sm90.problem import Problem
from tests.jax_impl.prefill.problems import bf16
from tests.jax_impl.prefill.reference import assert_agrees, reference
from tests.jax_impl.prefill.sparse.pages import LAYOUT, random_caches, rows_of

SIZES = ((3, 64), (30, 2))
SLOTS = 3 * 64 + 30 * 2
HEADS, TOPK = 64, 256
SM_SCALE = 4 * 512**-0.5


def problem_that_needs_every_part():
    """Three tiles for one thread block, of two pairs, of one and of two.

    Lengths end inside a block, with slots of both caches behind them; there are holes.
    """
    rng = np.random.default_rng(0)
    caches = random_caches(*SIZES)
    q = bf16(rng.standard_normal((3, HEADS, 512)))
    slots = rng.integers(0, SLOTS, (3, TOPK)).astype(np.int32)
    slots[:, ::9] = -1
    slots[:, 4] = SLOTS
    return q, caches, slots, np.asarray([200, 90, 256], np.int32)


def interpret(config: PagedConfig, *, detect_races: bool) -> tuple[object, bool]:
    """The body as it is now, traced afresh; the result, and whether a race was seen."""
    q, caches, slots, length = problem_that_needs_every_part()
    jax.clear_caches()
    scale = np.asarray([SM_SCALE * math.log2(math.e)], np.float32)
    sink = np.full(HEADS, -np.inf, np.float32)
    pages = tuple(Pages(num_slots=c.num_slots, page_size=c.page_size) for c in caches)
    operands = map(jnp.asarray, (slots, scale, sink, length))
    try:
        result = attend_pages(
            jnp.asarray(q), [c.cache for c in caches], *operands, pages=pages, config=config,
            interpret=plgpu.InterpretGPUParams(
                detect_races=detect_races, uninitialized_memory="nan"
            ),
        )  # fmt: skip
        jax.block_until_ready(result)
        races = detect_races and interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return result, races


def check(config: PagedConfig | None = None, *, detect_races: bool = True) -> None:
    """Passes for the right body alone."""
    config = config or PagedConfig(num_ctas=1, part_tiles=4, early_tiles=4)
    result, races = interpret(config, detect_races=detect_races)
    assert not races, "the interpreter has seen a race"
    q, caches, slots, length = problem_that_needs_every_part()
    expected = reference(q, rows_of(caches), slots, SM_SCALE, topk_length=length)
    assert_agrees(result, expected, statistics_ulps=32)


def test_the_right_body_gives_the_right_result_without_a_race():
    check()


@pytest.mark.parametrize(("part_tiles", "early_tiles"), [(1, 3), (2, 2), (4, 0)])
def test_parts_of_any_size_bring_the_same_keys_however_early(part_tiles, early_tiles):
    config = PagedConfig(num_ctas=1, part_tiles=part_tiles, early_tiles=early_tiles)
    check(config, detect_races=False)


def test_keys_that_are_read_exactly_are_the_same_keys(monkeypatch):
    """Under the interpreter nothing is unusual, unless it is said to be."""
    monkeypatch.setattr(seams_interpret, "any_unusual", lambda unusual: unusual + 1)
    check()
    monkeypatch.setattr(seams_interpret, "store_exactly", lambda *arguments: None)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check()


WRONG_ROW = "worst row"
# Some versions of the interpreter print a race and go on, others raise it.
RACE = "seen a race|RACE DETECTED"
BARRIER_OR_RACE = (
    f"Barrier completed phase|had only observed barrier|but barrier is already at phase|{RACE}"
)

_STORE = """\
        for number, (tiles, columns) in enumerate(zip(side.parts, loaded.parts, strict=True)):
            k.seams.store_columns(k.smem.kv, side.slot, tiles, columns, loaded.scales, k.problem)
            end = number + 1 if number + 1 < len(side.parts) else len(late)
            ahead = _load(k, late[number:end], ahead, after)
"""

_WAIT = "    _wait_until_free(k, side, rounds, loaded.block.slots)\n"
_COPY = """\
    if side.side == RIGHT:
        _copy_plain(k, side, loaded.block)
"""

# Each: how it shows, the text as it stands in the producer, and what it is replaced by.
FAULTS = {
    "the length is not tested": (
        WRONG_ROW,
        "key_is_valid(slot, place, k.problem.num_kv, pair.length)",
        "key_is_valid(slot, place, k.problem.num_kv, k.problem.topk)",
    ),
    "a hole reads the slot that it names": (
        "worst row|lse",
        "jnp.where(valid, slot, -1)",
        "jnp.clip(slot, 0, k.problem.num_kv - 1)",
    ),
    "a tile's first pair is held to the length of the tile before": (
        WRONG_ROW,
        "length=jnp.where(is_last, next_length, own.length)",
        "length=own.length",
    ),
    "what is read ahead is this pair's again": (
        WRONG_ROW,
        "(next_slots if behind.number == 0 else slots)[behind.slot]",
        "slots[behind.slot]",
    ),
    "the mask is the other block's": (
        "worst row|lse",
        "return rounds + 1, next_slots, loaded",
        "return rounds + 1, next_slots[::-1], loaded",
    ),
    "a slot is refilled before it is free": (
        BARRIER_OR_RACE,
        "    k.seams.wait(k.smem.barriers, kv_free[side.slot][side.side], rounds - 1)\n",
        "",
    ),
    "columns are announced before they are stored": (
        RACE,
        _STORE + "        # The fence that the products need is on their side, as for the gather.\n"
        "        k.seams.arrive(k.smem.barriers, ready)\n",
        "        k.seams.arrive(k.smem.barriers, ready)\n" + _STORE,
    ),
    "plain columns are copied before the slot is free": (
        BARRIER_OR_RACE,
        _WAIT + _COPY,
        _COPY + _WAIT,
    ),
    "plain columns are the block's ahead": (
        WRONG_ROW,
        "_copy_plain(k, side, loaded.block)",
        "_copy_plain(k, side, ahead.block)",
    ),
    "a part is left out": (
        "worst row|lse|RACE|nan",
        "zip(side.parts, loaded.parts, strict=True)):\n            k.seams",
        "zip(side.parts[1:], loaded.parts[1:], strict=True)):\n            k.seams",
    ),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_producer_is_found(plant, fault):
    shows_as, old, new = FAULTS[fault]
    plant(paged_producer, old, new)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=shows_as):
        check()


def test_the_producer_names_no_backend():
    source = inspect.getsource(paged_producer)
    for word in ("seams_cuda", "seams_interpret", "interpret=", "inline_mgpu", "ptx"):
        assert word not in source, word


def lowered(heads: int, page_sizes: tuple[int, ...], config: PagedConfig | None = None) -> str:
    tokens, num_pages = 256, 1000
    caches = tuple(
        jax.ShapeDtypeStruct((num_pages, LAYOUT.page_stride(size)), jnp.uint8)
        for size in page_sizes
    )
    pages = tuple(Pages(num_slots=num_pages * size, page_size=size) for size in page_sizes)
    shapes = (
        jax.ShapeDtypeStruct((tokens, heads, 512), jnp.bfloat16),
        caches,
        jax.ShapeDtypeStruct((tokens, 640), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.float32),
        jax.ShapeDtypeStruct((heads,), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )

    def call(*arrays):
        return attend_pages(*arrays, pages=pages, config=config)

    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("heads", "page_sizes"), [(64, (64,)), (128, (64, 2)), (16, (53, 64)), (128, (256, 61))]
)
def test_the_kernel_lowers_for_cuda_on_any_machine(heads, page_sizes):
    assert "mosaic_gpu" in lowered(heads, page_sizes)


@pytest.mark.parametrize(
    "config",
    [
        PagedConfig(early_tiles=4, consumer_registers=192, producer_registers=120),
        PagedConfig(early_tiles=2, gather_prefetch="128B"),
        PagedConfig(part_tiles=2, early_tiles=2, row_prefetch=False),
        PagedConfig(part_tiles=4, early_tiles=0, row_prefetch_alone=True),
    ],
    ids=str,
)
def test_every_tuning_lowers(config):
    assert "mosaic_gpu" in lowered(64, (64, 2), config)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"part_tiles": 3}, "part_tiles must be 1, 2 or 4; got 3"),
        ({"early_tiles": 5}, "a multiple of part_tiles = 1 between 0 and 4; got 5"),
        ({"part_tiles": 4, "early_tiles": 2}, "a multiple of part_tiles = 4 .* got 2"),
        ({"producer_registers": 112}, "must not exceed 504 together; got 512"),
    ],
)
def test_a_config_that_cannot_work_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        PagedConfig(**wrong)


def test_rows_are_asked_for_ahead_where_tiles_share_them_or_when_told():
    shape = {"num_tokens": 1, "d_qk": 512, "num_kv": 8, "topk": 128}
    one, two = Problem(num_heads=64, **shape), Problem(num_heads=128, **shape)
    assert [PagedConfig().prefetches_rows(p) for p in (one, two)] == [False, True]
    alone = PagedConfig(row_prefetch_alone=True)
    assert [alone.prefetches_rows(p) for p in (one, two)] == [True, True]
    assert not PagedConfig(row_prefetch=False, row_prefetch_alone=True).prefetches_rows(one)
