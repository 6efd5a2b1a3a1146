"""The body of the gather kernel under Pallas' interpreter: that it is the same body, that thread
blocks don't touch one another's rows, and that faults planted in it are found."""

from __future__ import annotations

import inspect
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kv_cache import positions
from jax_impl.kv_cache.kernel_sm90 import (
    Config,
    gather,
    kernel,
    launch,
    pieces,
    seams_cuda,
    seams_interpret,
)
from jax_impl.kv_cache.kernel_sm90.problem import Problem
from tests.jax_impl.kv_cache.model import (
    as_paged,
    gathered_bits,
    int32,
    page_bytes,
    poison,
    random_cache,
    same_bits,
)
from tests.jax_impl.planted import FOUND


def check() -> None:
    """Passes for the right body alone.

    More rows than a thread block's; requests that begin and end within a page, one without rows,
    one that fills the workspace; entries of the block table that nobody should look at; a page
    number and a length that are out of range, as they may be inside jit; and NaN wherever a
    token isn't to come from.
    """
    paged = random_cache("v4-fp8", 9, 8)
    pages = page_bytes(paged)
    pages[8] = 0xFF
    paged = as_paged(pages, "v4-fp8", 8)
    table = int32([[-9, 2, 7, 0, 5, 8], [8, 8, 8, 8, 8, 8], [1, 0, 3, 6, 4, 8], [6, 8, 8, 8, 8, 8]])
    seq, lens, offset = int32([37, 11, 40, 3]), int32([16, 0, 40, 7]), 3
    workspace = poison(4, 43, 512)
    jax.clear_caches()
    try:
        got = gather(
            paged, table, seq, lens, workspace, jnp.int32(offset),
            interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
        )  # fmt: skip
        jax.block_until_ready(got)
        races = interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    assert not races, "the interpreter has seen a race"
    expected = gathered_bits(paged, table[:3], seq[:3], workspace, lens[:3], offset)
    last = gathered_bits(paged, table[3:], seq[3:], workspace[3:])
    expected[3, offset + 4 : offset + 7] = last[0, :3]  # positions -4 to -1 aren't there
    assert same_bits(got, expected)


def test_the_right_body_gives_the_right_result_without_a_race():
    check()


# Each: the module, the text as it stands there, and what it is replaced by.
FAULTS = {
    "rows begin one too early": (
        positions,
        "self.gather_len + (row - self.offset)",
        "self.gather_len + 1 + (row - self.offset)",
    ),
    "the row behind the last one is written": (
        positions,
        "row < self.first + self.count",
        "row <= self.first + self.count",
    ),
    "rows before the first token are written": (
        positions,
        "within & (self.position(row) >= 0)",
        "within",
    ),
    "the offset is left out": (kernel, "row = rows.first + first + place", "row = first + place"),
    "the block table is read at the row's place": (
        kernel,
        "jnp.where(wanted, rows.position(row), 0)",
        "jnp.where(wanted, row, 0)",
    ),
    "the page of the first row serves all": (
        kernel,
        "column = lax.div(position, I32(problem.page_size))",
        "column = lax.div(position, I32(problem.page_size)) * 0",
    ),
    "the offset within the page is left out": (
        kernel,
        "lax.rem(position, I32(problem.page_size))",
        "lax.rem(position, I32(1))",
    ),
    "a thread block serves the request before": (
        kernel,
        "lax.div(number, blocks), lax.rem(number, blocks)",
        "lax.div(number, blocks + 1), lax.rem(number, blocks)",
    ),
    "later thread blocks copy the first rows again": (
        kernel,
        "first = block * config.rows_per_block",
        "first = block * 0",
    ),
    "every request has the first one's table": (
        kernel,
        "gmem.block_table, request,",
        "gmem.block_table, request * 0,",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_body_is_found(plant, fault):
    plant(*FAULTS[fault])
    with pytest.raises(FOUND) as caught:
        check()
    print(f"{fault}: {type(caught.value).__name__}: {str(caught.value)[:200]}")


def problem(**changes: Any) -> Problem:
    extents: dict[str, Any] = dict(
        kv_format="v4-fp8", page_size=64, num_pages=4, num_columns=2, num_requests=2, num_rows=100
    )
    return Problem(**(extents | changes))


def test_both_backends_run_the_same_body_function(monkeypatch):
    ran = []

    def stop(problem, config, seams, gmem):
        ran.append(seams)
        raise StopIteration

    assert launch.gather_body is kernel.gather_body
    monkeypatch.setattr(launch, "gather_body", stop)
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((4, 37440), "uint8"),
            ((2, 2), "int32"),
            ((2,), "int32"),
            ((2,), "int32"),
            ((1,), "int32"),
            ((2, 100, 512), "bfloat16"),
        )
    ]
    for interpret in (None, plgpu.InterpretGPUParams()):
        with pytest.raises((StopIteration, RuntimeError)):
            jax.eval_shape(launch.build(problem(), Config(), interpret), *shapes)
    assert ran == [seams_cuda, seams_interpret]


def test_the_two_sides_of_the_seams_have_the_same_names_and_parameters():
    def signatures(module: types.ModuleType) -> dict[str, list[str]]:
        return {
            name: [str(p) for p in inspect.signature(getattr(module, name)).parameters.values()]
            for name in module.__all__
        }

    assert signatures(seams_cuda) == signatures(seams_interpret)


def test_only_the_seams_and_the_launch_name_a_backend():
    for module in (kernel, positions):
        source = inspect.getsource(module)
        for word in ("seams_cuda", "seams_interpret", "interpret=", "inline_mgpu", "ptx"):
            assert word not in source, (module.__name__, word)


@pytest.mark.parametrize("name", ["v4-fp8", "v3.2-fp8", "bf16", "bf16-576"])
def test_the_steps_of_a_row_cover_its_columns_once(name):
    layout = problem(kv_format=name).layout
    steps = pieces.steps(layout)
    taken = [step.first + lane for step in steps for lane in range(step.lanes)]
    assert taken == list(range(layout.d // pieces.COLUMNS))
    codes = [step.first + lane for step in steps for lane in range(step.code_lanes)]
    assert codes == list(range(layout.quantised_columns // pieces.COLUMNS))


@pytest.mark.parametrize("name", ["v4-fp8", "v3.2-fp8", "bf16", "bf16-576"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 53, 61, 64, 69, 256])
def test_every_page_size_keeps_pieces_aligned(name, page_size):
    pieces.check_alignment(problem(kv_format=name).layout, page_size)


@pytest.mark.parametrize("rows_per_warp", [2, 3, 8])
@pytest.mark.parametrize("name", ["v4-fp8", "bf16-576"])
def test_any_number_of_rows_per_warp_gives_the_same(name, rows_per_warp):
    paged = random_cache(name, 5, 3)
    table, workspace = int32([[4, 0, 2, 1, 3]]), poison(1, 14, paged.d)
    got = gather(
        paged, table, int32([13]), int32([12]), workspace, jnp.int32(1),
        config=Config(rows_per_warp=rows_per_warp), interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    assert same_bits(got, gathered_bits(paged, table, [13], workspace, [12], 1))


@pytest.mark.parametrize("rows", [1, 17])
def test_a_config_that_cannot_work_is_refused(rows):
    with pytest.raises(ValueError, match=rf"rows_per_warp must lie in \[2, 16\]; got {rows}"):
        Config(rows_per_warp=rows)


def test_a_thread_block_serves_the_rows_of_one_request():
    assert problem(num_rows=33).blocks_per_request(Config(rows_per_warp=4)) == 3
    assert np.prod([problem().num_requests, problem().blocks_per_request(Config())]) == 14
