"""The body of the Hopper kernel under Pallas' interpreter: that it is the same body, that its
memory accesses are ordered, and that faults planted in it are found."""

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

from jax_impl.decode.kernel_sm90 import (
    Config,
    consumers,
    epilogue,
    kernel,
    launch,
    merging,
    producer,
    seams_cuda,
    seams_interpret,
)
from jax_impl.decode.kernel_sm90.problem import Problem
from jax_impl.mosaic import online_softmax
from tests.jax_impl.decode.batches import Batch
from tests.jax_impl.decode.reference import assert_agrees, reference
from tests.jax_impl.planted import FOUND


def batch_that_needs_every_part() -> Batch:
    """Several items for one thread block, two pairs of blocks in some of them, keys cut in two.

    Maxima keep rising. Each row of a tile has its own bound, one of them in another block than
    the others'; a request's last block is partly filled, one has no keys, and pages are shorter
    than blocks.
    """
    batch = Batch(
        total_lens=[257, 40, 300, 0], query_lens=[3, 1, 1, 1], heads=3, sm_scale=0.3,
        plan_options={"split_keys": 256},
    )  # fmt: skip
    for keys in batch.keys:
        rising = np.linspace(0.1, 3, len(keys))[:, None]
        keys[:] = (np.asarray(keys, np.float32) * rising).astype(keys.dtype)
    return batch


def interpret(batch: Batch) -> tuple[Any, bool]:
    """The body as it is now, traced afresh; the result, and whether a race was seen."""
    jax.clear_caches()
    try:
        result = launch.attend(
            batch.q, *batch.cache(), batch.plan(), np.float32(batch.sm_scale), np.float32(1),
            out_dtype=jnp.float32,
            interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
        )  # fmt: skip
        jax.block_until_ready(result)
        races = interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return result, races


def check() -> None:
    """Passes for the right body alone."""
    batch = batch_that_needs_every_part()
    result, races = interpret(batch)
    assert not races, "the interpreter has seen a race"
    expected = reference(batch.q, batch.keys, batch.query_lens, batch.sm_scale)
    assert_agrees(result, expected, lse_ulps=64)


@pytest.mark.timeout(120)
def test_the_right_body_gives_the_right_result_without_a_race():
    plan = batch_that_needs_every_part().plan()
    assert len(plan.merges) == 2 and plan.num_partials == 4 and len(plan.items) == 6
    check()


# Each: the module, the text as it stands there, and what it is replaced by.
FAULTS = {
    "a row sees one key too many": (
        consumers,
        "key < over_columns(row_keys, scores)",
        "key <= over_columns(row_keys, scores)",
    ),
    "rows of a tile are masked by the one that sees most": (
        consumers,
        "first_key + BLOCK_KEYS > item.full",
        "first_key + BLOCK_KEYS > item.end",
    ),
    "values behind the last key are not cleared": (
        consumers,
        "k.smem.chunks[chunk].at[slot], item.end - first_key)",
        "k.smem.chunks[chunk].at[slot], item.end - first_key + 1)",
    ),
    "a rescale is left out": (
        online_softmax,
        "acc=rescaled(state.acc, factor, moved)",
        "acc=state.acc",
    ),
    "the weights of the even and the odd block are swapped": (
        consumers,
        "weights = k.smem.rope.at[slot]",
        "weights = k.smem.rope.at[1 - slot]",
    ),
    "weights are not waited for": (
        consumers,
        "k.seams.wait(k.smem.handover, weights_ready[parity], round_)",
        "pass",
    ),
    "the next queries are loaded over those in use": (
        consumers,
        "pl.when(is_last & has_next)",
        "pl.when((p == 0) & has_next)",
    ),
    "a slot is refilled before it is free": (
        producer,
        "pl.when(rounds > 0)(lambda: plgpu.barrier_wait(free))",
        "pass",
    ),
    "the second page of a block is the first one again": (
        producer,
        "slot * BLOCK_KEYS + part * k.problem.rows_per_copy",
        "slot * BLOCK_KEYS",
    ),
    "partial results are weighed in another base": (
        epilogue,
        "jnp.log(total) + state.reference * LN_2",
        "jnp.log(total) + state.reference",
    ),
    "the last partial result is taken again": (
        merging,
        "jnp.where(place < end, partial_lse[at, row], -jnp.inf)",
        "partial_lse[at, row]",
    ),
    "rows without keys are not written": (
        consumers,
        "write_rows_without_keys(k, RIGHT)",
        "pass",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_body_is_found(plant, fault):
    plant(*FAULTS[fault])
    with pytest.raises(FOUND) as caught:
        check()
    print(f"{fault}: {type(caught.value).__name__}: {str(caught.value)[:300]}")


def problem(**changes: Any) -> Problem:
    extents: dict[str, Any] = dict(
        num_rows=6, heads=3, num_pages=4, page_size=64, max_pages=2, num_requests=1,
        num_workers=1, cluster=1, num_partials=0, widened=False, out_dtype=jnp.bfloat16,
    )  # fmt: skip
    return Problem(**(extents | changes))


def test_both_backends_run_the_same_body_function(monkeypatch):
    ran = []

    def stop(problem, config, seams, roles, gmem, smem):
        ran.append(seams)
        raise StopIteration

    assert launch.decode_body is kernel.decode_body
    monkeypatch.setattr(launch, "decode_body", stop)
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((64, 576), "bfloat16"),
            ((4, 64, 576), "bfloat16"),
            ((1, 2), "int32"),
            ((1, 1, 8), "int32"),
            ((3,), "int32"),
            ((2,), "int32"),
            ((2,), "float32"),
            ((6, 512), "bfloat16"),
            ((6,), "float32"),
        )
    ]
    for interpret_params in (None, plgpu.InterpretGPUParams()):
        with pytest.raises((StopIteration, RuntimeError)):
            jax.eval_shape(launch.build(problem(), Config(), interpret_params), *shapes)
    assert ran == [seams_cuda, seams_interpret]


def test_the_two_sides_of_the_seams_have_the_same_names_and_parameters():
    def signatures(module: types.ModuleType) -> dict[str, list[str]]:
        return {
            name: [str(p) for p in inspect.signature(value).parameters.values()]
            for name, value in vars(module).items()
            if inspect.isfunction(value) and not name.startswith("_")
            and value.__module__.startswith(("jax_impl.decode", "jax_impl.mosaic"))
            and name not in ("side_columns",)
        }  # fmt: skip

    assert signatures(seams_cuda) == signatures(seams_interpret)
    assert set(signatures(seams_cuda)) == set(seams_cuda.__all__)


def test_only_the_seams_and_the_launch_name_a_backend():
    """Parts of the body that ask which backend they run on would no longer be one body."""
    for module in (kernel, consumers, epilogue, producer, online_softmax):
        source = inspect.getsource(module)
        for word in ("seams_cuda", "seams_interpret", "interpret=", "inline_mgpu", "ptx"):
            assert word not in source, (module.__name__, word)
