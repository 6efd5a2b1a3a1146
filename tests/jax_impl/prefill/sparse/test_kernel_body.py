"""The body of the Hopper kernel under Pallas' interpreter: that it is the same body, that its
memory accesses are ordered, and that faults planted in it are found."""

from __future__ import annotations

import functools
import inspect
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic import online_softmax
from jax_impl.prefill.sparse.kernel_sm90 import (
    Config,
    consumers,
    epilogue,
    kernel,
    launch,
    producer,
    seams_cuda,
    seams_interpret,
)
from jax_impl.prefill.sparse.kernel_sm90.problem import Problem
from tests.jax_impl.prefill.problems import bf16
from tests.jax_impl.prefill.reference import assert_agrees, reference

TOKENS, HEADS, ROWS, TOPK = 2, 64, 300, 256


def problem_that_needs_every_part(d: int):
    """Two tiles for one thread block, two pairs of blocks each, with maxima that keep rising.

    The first token's length ends inside a block, with keys behind it; there are holes, and a
    sink about as heavy as the keys.
    """
    rng = np.random.default_rng(0)
    q = bf16(rng.standard_normal((TOKENS, HEADS, d)))
    kv = rng.standard_normal((ROWS, d)) * np.linspace(0.1, 3, ROWS)[:, None]
    indices = np.sort(rng.integers(0, ROWS, (TOKENS, TOPK)), axis=1).astype(np.int32)
    indices[:, ::9] = -1
    sm_scale = 6 * d**-0.5
    length = np.asarray([200, 256], np.int32)
    lse = reference(q, kv, indices, sm_scale, topk_length=length).lse
    sink = lse.mean(axis=0).astype(np.float32)
    return q, bf16(kv), indices, sm_scale, sink, length


def interpret(d: int, *, detect_races: bool) -> tuple[object, bool]:
    """The body as it is now, traced afresh; the result, and whether a race was seen."""
    q, kv, indices, sm_scale, sink, length = problem_that_needs_every_part(d)
    jax.clear_caches()
    scale = np.asarray([sm_scale * math.log2(math.e)], np.float32)
    operands = map(jnp.asarray, (q, kv, indices, scale, sink, length))
    try:
        result = launch.attend(
            *operands, num_kv=ROWS, config=Config(num_ctas=1),
            interpret=plgpu.InterpretGPUParams(
                detect_races=detect_races, uninitialized_memory="nan"
            ),
        )  # fmt: skip
        jax.block_until_ready(result)
        races = detect_races and interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return result, races


def check(d: int) -> None:
    """Passes for the right body alone."""
    result, races = interpret(d, detect_races=True)
    assert not races, "the interpreter has seen a race"
    q, kv, indices, sm_scale, sink, length = problem_that_needs_every_part(d)
    expected = reference(q, kv, indices, sm_scale, attn_sink=sink, topk_length=length)
    assert_agrees(result, expected, statistics_ulps=32)


@pytest.mark.parametrize("d", [512, 576])
def test_the_right_body_gives_the_right_result_without_a_race(d):
    check(d)


WRONG_ROW = "worst row"
# Some versions of the interpreter print a race and go on, others raise it.
RACE = "seen a race|RACE DETECTED"
BARRIER_OR_RACE = f"Barrier completed phase|had only observed barrier|{RACE}"

# Each: how it shows, the module, the text as it stands there, and what it is replaced by.
FAULTS = {
    "the last block is skipped": (
        WRONG_ROW,
        kernel,
        "lax.div(length + (PAIR_KEYS - 1), I32(PAIR_KEYS))",
        "lax.div(length, I32(PAIR_KEYS))",
    ),
    "the length is not tested": (
        WRONG_ROW,
        producer,
        "key_is_valid(index, place, k.problem.num_kv, pair.length)",
        "key_is_valid(index, place, k.problem.num_kv, k.problem.topk)",
    ),
    "a rescale is left out": (
        WRONG_ROW,
        online_softmax,
        "acc=rescaled(state.acc, factor, moved)",
        "acc=state.acc",
    ),
    "the weights of the even and the odd block are swapped": (
        WRONG_ROW,
        consumers,
        "k.smem.weights[0].at[slot]",
        "k.smem.weights[0].at[1 - slot]",
    ),
    "the sink enters lse": (
        "lse: ",
        epilogue,
        "lse = jnp.log(total)",
        "lse = jnp.log(denominator)",
    ),
    "a barrier is not waited for": (
        BARRIER_OR_RACE,
        consumers,
        "k.seams.wait(k.smem.barriers, weights_ready[ODD], round_)",
        "pass",
    ),
    "a slot is refilled before it is free": (
        BARRIER_OR_RACE,
        producer,
        "k.seams.wait(k.smem.barriers, kv_free[slot][RIGHT], rounds - 1)",
        "pass",
    ),
    "the next queries are loaded over those in use": (
        RACE,
        consumers,
        "    k.seams.wait(k.smem.barriers, weights_ready[EVEN], round_)\n    after_last_scores()\n",
        "    after_last_scores()\n    k.seams.wait(k.smem.barriers, weights_ready[EVEN], round_)\n",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_body_is_found(plant, fault):
    shows_as, *replacement = FAULTS[fault]
    plant(*replacement)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=shows_as):
        check(d=512)


def test_both_backends_run_the_same_body_function(monkeypatch):
    ran = []

    def stop(problem, config, seams, roles, gmem, smem):
        ran.append((launch_body, seams))
        raise StopIteration

    launch_body = launch.sparse_prefill_body
    assert launch_body is kernel.sparse_prefill_body
    monkeypatch.setattr(launch, "sparse_prefill_body", stop)
    problem = Problem(num_tokens=1, num_heads=64, d_qk=512, num_kv=8, topk=128)
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1, 64, 512), "bfloat16"),
            ((8, 512), "bfloat16"),
            ((1, 128), "int32"),
            ((1,), "int32"),
            ((64,), "float32"),
            ((1,), "float32"),
            ((1,), "int32"),
        )
    ]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 64), (1, 64))]
    results = [jax.ShapeDtypeStruct((1, 64, 512), jnp.bfloat16), *results]

    def call(interpret_params, *operands):
        kernel = launch.build(problem, Config(), interpret_params)
        kernel(*operands, *map(jax.empty_ref, results))

    for interpret_params in (None, plgpu.InterpretGPUParams()):
        with pytest.raises((StopIteration, RuntimeError)):
            jax.eval_shape(functools.partial(call, interpret_params), *shapes)
    assert [seams for _, seams in ran] == [seams_cuda, seams_interpret]


def test_the_two_sides_of_the_seams_have_the_same_names_and_parameters():
    def signatures(module: types.ModuleType) -> dict[str, list[str]]:
        return {
            name: [str(p) for p in inspect.signature(value).parameters.values()]
            for name, value in vars(module).items()
            if inspect.isfunction(value) and not name.startswith("_")
            and value.__module__.startswith((module.__name__, "jax_impl.mosaic"))
        }  # fmt: skip

    assert signatures(seams_cuda) == signatures(seams_interpret)
    assert set(signatures(seams_cuda)) == set(seams_cuda.__all__)


def test_only_the_seams_and_the_launch_name_a_backend():
    """Parts of the body that ask which backend they run on would no longer be one body."""
    for module in (kernel, consumers, epilogue, producer, online_softmax):
        source = inspect.getsource(module)
        for word in ("seams_cuda", "seams_interpret", "interpret=", "inline_mgpu", "ptx"):
            assert word not in source.replace("seams_interpret.py", ""), (module.__name__, word)
