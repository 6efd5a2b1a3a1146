"""Random problems against float64, and the bits that must not depend on the batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_impl import SparsePrefillResult
from tests.jax_impl.prefill.problems import HEADS, TOKENS, assert_same_bits, random_problem, run
from tests.jax_impl.prefill.reference import assert_agrees, reference


@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 5, "heads": 7, "d": 576, "rows": 250, "topk": 133},
        {"tokens": 3, "heads": 128, "d": 512, "rows": 1000, "topk": 1},
        {"tokens": 2, "heads": 65, "d": 576, "rows": 90, "topk": 700},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
@pytest.mark.parametrize("logit_spread", [0.1, 2.0, 40.0])
def test_xla_agrees_with_float64(shape, logit_spread):
    q, kv, indices, scale = random_problem(0, **shape, logit_spread=logit_spread)
    rng = np.random.default_rng(1)
    sink = rng.standard_normal(shape["heads"]).astype(np.float32)
    length = rng.integers(0, shape["topk"] + 1, shape["tokens"]).astype(np.int32)
    result = run("xla", q, kv, indices, scale, attn_sink=sink, topk_length=length)
    expected = reference(q, kv, indices, scale, attn_sink=sink, topk_length=length)
    assert_agrees(result, expected, statistics_ulps=32)


@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 2, "heads": 128, "d": 576, "rows": 300, "topk": 500},
        {"tokens": 3, "heads": 5, "d": 512, "rows": 300, "topk": 256},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
def test_the_kernel_agrees_with_float64_under_the_interpreter(shape):
    rng = np.random.default_rng(1)
    length = rng.integers(1, shape["topk"] + 1, shape["tokens"]).astype(np.int32)
    length[0] = shape["topk"]
    sink = rng.standard_normal(shape["heads"]).astype(np.float32)
    for logit_spread in (0.1, 40.0):
        q, kv, indices, scale = random_problem(0, **shape, logit_spread=logit_spread)
        arguments = {"attn_sink": sink, "topk_length": length}
        result = run("pallas-interpret", q, kv, indices, scale, **arguments)
        expected = reference(q, kv, indices, scale, **arguments)
        assert_agrees(result, expected, statistics_ulps=32)


def slices(result: SparsePrefillResult, start: int, end: int) -> SparsePrefillResult:
    return jax.tree.map(lambda array: array[start:end], result)


@pytest.mark.parametrize("d", [512, 576])
def test_a_batch_cut_into_pieces_gives_the_bits_of_one_call(backend, d):
    """As a plan of chunks is run: slices of q, indices and lengths over one kv."""
    q, kv, indices, scale = random_problem(3, d=d)
    length = np.asarray([128, 0, 77, 100], np.int32)
    sink = np.linspace(-1, 1, HEADS, dtype=np.float32)
    whole = run(backend, q, kv, indices, scale, attn_sink=sink, topk_length=length)
    for start, end in ((0, 1), (1, 1), (1, TOKENS)):  # one of them empty
        part = run(
            backend,
            q[start:end],
            kv,
            indices[start:end],
            scale,
            attn_sink=sink,
            topk_length=length[start:end],
        )
        assert_same_bits(part, slices(whole, start, end))


def test_heads_are_independent_of_one_another(backend):
    """64 heads alone and as the first half of 128 give the same bits."""
    q, kv, indices, scale = random_problem(4, heads=128)
    both = run(backend, q, kv, indices, scale)
    first = run(backend, q[:, :64], kv, indices, scale)
    assert_same_bits(first, SparsePrefillResult(*(array[:, :64] for array in both)))


def test_repeated_calls_give_the_same_bits(backend):
    problem = random_problem(5)
    assert_same_bits(run(backend, *problem), run(backend, *problem))


def test_jit_gives_the_bits_of_an_eager_call(backend):
    q, kv, indices, scale = random_problem(6)

    def call(q, kv, indices):
        return run_traced(backend, q, kv, indices, scale)

    assert_same_bits(jax.jit(call)(q, kv, indices), run(backend, q, kv, indices, scale))


def run_traced(backend: str, *problem) -> SparsePrefillResult:
    from jax_impl import sparse_prefill

    return sparse_prefill(*problem, backend=backend)


def test_blocks_of_tokens_on_other_platforms_do_not_change_the_result():
    """The path that only an accelerator takes, run here."""
    import functools

    import jax.numpy as jnp

    from jax_impl.prefill.sparse import xla

    q, kv, indices, scale = random_problem(7, tokens=5)
    token = functools.partial(
        xla._attend_token,
        read=lambda rows: jnp.asarray(kv)[rows],
        scale=jnp.float32(scale),
        sink=jnp.full((64,), -jnp.inf),
        num_kv=kv.shape[0],
        operand_dtype=jnp.bfloat16,
    )
    padded = jnp.pad(q, [(0, 0), (0, 64 - HEADS), (0, 0)])
    length = jnp.full((5,), indices.shape[1], jnp.int32)
    result = xla._in_blocks(token, 2, padded, jnp.asarray(indices), length)
    result = SparsePrefillResult(*(array[:, :HEADS] for array in result))
    assert_agrees(result, reference(q, kv, indices, scale))
