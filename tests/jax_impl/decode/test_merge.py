"""Merging: the formula, and what must not change or vanish in it."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import lse_from_base2, merge_states
from jax_impl.decode import lse_rows


def state(out, lse, tokens: int = 1, width: int = 4):
    """One head; every column of the output equal."""
    return np.full((tokens, 1, width), out, np.float32), np.full((tokens, 1), lse, np.float32)


def merged(*states, **options) -> tuple[float, float]:
    result = merge_states(*map(list, zip(*states, strict=True)), **options)
    return float(result.out[0, 0, 0]), float(result.lse[0, 0])


def test_ranks_of_eight_keys_and_one_weigh_eight_to_one():
    """vllm-project/vllm#47079: taken for base 2, the weights give 1.426833."""
    out, lse = merged(state(1, math.log(8)), state(10, 0))
    assert out == pytest.approx(2.0, rel=1e-6)
    assert lse == pytest.approx(2.197225, rel=1e-6)
    wrong, _ = merged(state(1, 3), state(10, 0))
    assert wrong == pytest.approx(1.426833, rel=1e-6)


def test_base_2_is_converted_by_name():
    base2 = np.array([[3.0], [0.0], [-np.inf], [np.inf]], np.float32)
    np.testing.assert_allclose(
        lse_from_base2(base2)[:, 0], [math.log(8), 0, -math.inf, math.inf], rtol=1e-7
    )
    out, lse = merged((state(1, 0)[0], np.asarray(lse_from_base2(base2[:1]))), state(10, 0))
    assert (out, lse) == (pytest.approx(2.0, rel=1e-6), pytest.approx(2.197225, rel=1e-6))


@pytest.mark.parametrize("bases", ["base2", ["base2", "base2"], ("base2", "base2")])
def test_a_declared_base_2_is_converted(bases):
    out, lse = merged(state(1, 3), state(10, 0), bases=bases)
    assert (out, lse) == (pytest.approx(2.0, rel=1e-6), pytest.approx(2.197225, rel=1e-6))
    assert merged(state(0, math.inf), state(5, 2), bases="base2") == (5.0, pytest.approx(1.386294))
    assert merged(state(1, 3), state(10, 0), bases="natural") == merged(state(1, 3), state(10, 0))


@pytest.mark.parametrize(
    ("bases", "message"),
    [
        (["natural", "base2"], r"^bases must be the same for all states; got natural, base2"),
        ("e", r"^bases must be 'natural' or 'base2'; got 'e'"),
        (["natural", None], r"^bases must be 'natural' or 'base2'; got None"),
        (["natural"], r"^bases must be one word, .* each of the 2 states; got \['natural'\]"),
        (None, r"^bases must be one word, .* got None"),
    ],
)
def test_bases_that_are_mixed_or_unknown_are_refused(bases, message):
    with pytest.raises(ValueError, match=message):
        merged(state(1, 3), state(10, 0), bases=bases)


def test_a_mean_of_ranks_counts_their_keys_and_not_the_ranks_without():
    """vllm-project/vllm#38416: five empty ranks taken for lse 0 give 2.25."""
    empty = [state(np.nan, -math.inf)] * 5  # a rank without keys may leave its output unwritten
    out, lse = merged(state(3, 0), state(6, 0), state(9, 0), *empty)
    assert (out, lse) == (pytest.approx(6.0), pytest.approx(1.098612, rel=1e-6))
    wrong, _ = merged(state(3, 0), state(6, 0), state(9, 0), *[state(0, 0)] * 5)
    assert wrong == pytest.approx(2.25)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_states_without_keys_merge_to_one_without_keys(count):
    """flashinfer-ai/flashinfer#4051."""
    nothing = merged(*[state(0, -math.inf)] * count)
    assert nothing == (0.0, -math.inf)
    assert merged(state(*nothing), state(7, 0.5)) == (7.0, 0.5)
    assert merged(state(7, 0.5), state(*nothing)) == (7.0, 0.5)


def test_plus_infinity_means_without_keys_too():
    """deepseek-ai/FlashMLA#77: FlashMLA's sentinel must not win the merge."""
    assert merged(state(0, math.inf), state(5, 1.25)) == (5.0, 1.25)
    assert merged(state(0, math.inf), state(0, -math.inf)) == (0.0, -math.inf)


def test_large_lses_do_not_overflow():
    """NVIDIA/cutlass#2274."""
    out, lse = merged(state(1, 300), state(0, 298))
    assert out == pytest.approx(0.880797, rel=1e-6)
    assert lse == pytest.approx(300.126928, rel=1e-7)


@pytest.mark.parametrize(("value", "count"), [(3e38, 2), (-3e38, 2), (3e38, 5)])
def test_large_outputs_do_not_overflow(value, count):
    out, lse = merged(*[state(value, 0)] * count)
    assert out == pytest.approx(value, rel=1e-6)
    assert lse == pytest.approx(math.log(count), rel=1e-6)


def test_a_nan_lse_is_never_dropped():
    result = merge_states(
        [np.ones((2, 1, 4), np.float32)] * 2,
        [np.array([[0], [np.nan]], np.float32), np.zeros((2, 1), np.float32)],
    )
    np.testing.assert_array_equal(np.isnan(result.lse[:, 0]), [False, True])
    np.testing.assert_array_equal(np.isnan(result.out[:, 0, 0]), [False, True])
    with pytest.raises(ValueError, match=r"lses\[1\] must not be NaN; it is at \[0, 0\]"):
        merged(state(1, 0), state(1, math.nan), debug_nans=True)
    assert merged(state(1, 0), state(1, 0), debug_nans=True)[0] == 1.0


def test_a_nan_output_that_weighs_something_stays_nan():
    out, lse = merged(state(1, 0), state(math.nan, -3))
    assert math.isnan(out) and math.isfinite(lse)


def test_any_order_and_any_grouping_agree():
    rng = np.random.default_rng(0)
    states = [state(*rng.uniform(-3, 3, 2)) for _ in range(3)] + [state(np.nan, -math.inf)]
    right = merged(*states)
    for order in itertools.permutations(states):
        assert merged(*order) == pytest.approx(right, rel=1e-6)
        pair = merge_states(*map(list, zip(*order[:2], strict=True)))
        assert merged(tuple(pair), *order[2:]) == pytest.approx(right, rel=1e-6)


def test_the_result_is_rounded_once_to_the_dtype_of_the_outputs():
    outs = [np.full((1, 1, 1), value, jnp.bfloat16) for value in (1.0, 1.0078125)]
    result = merge_states(outs, [np.zeros((1, 1), np.float32)] * 2)
    assert result.out.dtype == jnp.bfloat16
    assert result.lse.dtype == np.float32


def test_stacked_arrays_and_jit_are_taken():
    outs, lses = np.stack([state(1, 0)[0]] * 3), np.stack([state(1, 0)[1]] * 3)
    assert jax.jit(merge_states)(outs, lses).lse[0, 0] == pytest.approx(math.log(3))


def test_lse_of_a_uniform_batch_is_transposed_and_not_reshaped():
    """vllm-project/vllm#46145: [B, H, q] with lse[b, h, s] = 100 b + 10 h + s."""
    b, h, s = np.ogrid[:2, :3, :2]
    rows = lse_rows(np.asarray(100 * b + 10 * h + s, np.float32))
    assert rows.tolist() == [[0, 10, 20], [1, 11, 21], [100, 110, 120], [101, 111, 121]]


OUT, LSE = state(1, 0)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "outs must hold at least one state; got none"),
        ([OUT], [LSE, LSE], "lses must be as many as outs, 1; got 2"),
        ([OUT, OUT[:, :, :2]], [LSE, LSE], r"outs\[1\] must be like outs\[0\]"),
        ([OUT], [LSE.T[:0]], r"lses must have the shape of outs without its last axis, \[1, 1\]"),
        ([OUT], [LSE.astype(np.float64)], r"lses\[0\] must be at most 32 bits wide"),
        ([OUT], [LSE.astype(np.float16)], r"lses\[0\] must be a float32 or float64 array"),
        ([OUT.astype(np.int32)], [LSE], r"outs\[0\] must be a bfloat16 .* got int32"),
        (OUT[0, 0], [LSE], "outs must be a sequence of arrays .* got ndarray"),
        ([[1.0]], [LSE], r"outs\[0\] must be .* got list"),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_are_refused(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge_states(outs, lses)


def test_nans_cannot_be_looked_for_inside_jit():
    with pytest.raises(ValueError, match="debug_nans must be off inside jit"):
        jax.jit(lambda out, lse: merge_states([out], [lse], debug_nans=True))(OUT, LSE)
