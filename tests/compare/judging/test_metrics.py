"""Distances between tensors against plain arithmetic on whole arrays."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compare.judging import elements
from compare.judging.device import to_numpy, upload
from compare.judging.elements import Pair
from compare.judging.metrics import Distance, Tolerance, to_float64

RULE = Tolerance(absolute=8e-4, relative=3.01 / 128, cosine=7e-6)
BFLOAT16 = ml_dtypes.bfloat16


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    return to_numpy(elements.round_to_bfloat16(torch.from_numpy(values)))


def ulp_distance(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return to_numpy(elements.ulp_distance(upload(got, "cpu"), upload(expected, "cpu")))


def pair(got: np.ndarray, expected: np.ndarray, skip: np.ndarray | None = None) -> Pair:
    left_out = None if skip is None else torch.from_numpy(skip)
    return Pair(upload(got, "cpu"), upload(expected, "cpu"), left_out)


def measured(tensor: str, got: np.ndarray, expected: np.ndarray, blocks: int = 1) -> Distance:
    distance = Distance(tensor, RULE)
    places = np.arange(len(got))[:, None]
    for part in np.array_split(np.arange(len(got)), blocks):
        distance.add(pair(got[part], expected[part]), places[part])
    return distance


def test_every_bfloat16_is_widened_exactly():
    every = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    widened = to_float64(every)
    with np.errstate(invalid="ignore"):  # signalling NaNs, which to_float64 must take in its stride
        np.testing.assert_array_equal(widened, every.astype(np.float64))


def test_bfloat16_neighbours_are_one_ulp_apart():
    every = np.arange(0x7F80, dtype=np.uint16).view(BFLOAT16)  # 0 to the largest finite value
    assert (ulp_distance(every[1:], every[:-1]) == 1).all()
    assert (ulp_distance(np.negative(every[1:]), np.negative(every[:-1])) == 1).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32])
def test_the_two_zeros_are_no_ulp_apart_and_signs_count_through_zero(dtype):
    smallest = ml_dtypes.finfo(dtype).smallest_subnormal
    values = np.array([0.0, -0.0, smallest, -smallest], dtype)
    np.testing.assert_array_equal(ulp_distance(values, values[[1, 0, 3, 2]]), [0, 0, 2, 2])


def test_float32_ulp_spans_the_whole_range():
    largest = np.array([np.finfo(np.float32).max])
    assert ulp_distance(largest, -largest)[0] == 2 * 0x7F7FFFFF


def test_ulp_needs_a_dtype_that_it_knows():
    with pytest.raises(TypeError, match="float64"):
        ulp_distance(np.zeros(1), np.zeros(1))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2**-8, 1.0),  # a tie goes to even
        (1 + 2**-8 + 2**-30, 1 + 2**-7),  # above the tie, though float32 would make it one
        (1 + 2**-8 - 2**-30, 1.0),
        (1 + 3 * 2**-8, 1 + 2**-6),
        (-(1 + 2**-8 + 2**-30), -(1 + 2**-7)),
        (2.0**-133, 2.0**-133),  # the smallest subnormal
        (math.inf, math.inf),
    ],
)
def test_float64_is_rounded_to_bfloat16_once(value: float, rounded: float):
    assert float(round_to_bfloat16(np.array([value]))[0]) == rounded


@given(st.floats(-3e38, 3e38))
def test_rounding_to_bfloat16_takes_a_nearest_value(value: float):
    rounded = round_to_bfloat16(np.array([value]))
    around = rounded.view(np.uint16).astype(np.int64) + np.array([-1, 0, 1])
    around = np.clip(around, 0, 0xFFFF).astype(np.uint16).view(BFLOAT16).astype(np.float64)
    around = around[np.isfinite(around)]
    assert abs(float(rounded[0]) - value) == np.abs(around - value).min()


def test_metrics_are_those_of_whole_arrays_however_they_are_cut():
    rng = np.random.default_rng(3)
    expected = rng.standard_normal((64, 512))
    got = (expected + 1e-3 * rng.standard_normal(expected.shape)).astype(BFLOAT16)
    wide = got.astype(np.float64)
    error = np.abs(wide - expected)
    relative = error / (np.abs(expected) + 1e-6)
    found = measured("out", got, expected, blocks=7).metrics()
    assert found.elements == expected.size
    assert found.max_abs == error.max()
    assert found.max_rel == relative.max()
    assert found.rel_l2 == pytest.approx(np.linalg.norm(error) / np.linalg.norm(expected))
    product = 2 * (wide * expected).sum() / ((wide**2).sum() + (expected**2).sum())
    assert found.cosine_difference == pytest.approx(1 - product, rel=1e-6)
    matched = (error < RULE.absolute) | (relative < RULE.relative)
    assert found.matched == matched.mean()
    assert found.quantiles_abs == pytest.approx(np.quantile(error, [0.5, 0.99, 1]), rel=2**-8)
    ulp = ulp_distance(got, round_to_bfloat16(expected))
    assert found.ulp[2] == ulp.max()
    assert found.ulp[:2] == tuple(np.quantile(ulp, [0.5, 0.99], method="inverted_cdf"))
    assert found.special == {}


def test_merged_distances_are_those_of_one():
    rng = np.random.default_rng(4)
    expected = rng.standard_normal((30, 64))
    got = (expected + 1e-2 * rng.standard_normal(expected.shape)).astype(BFLOAT16)
    got[3, 5], got[20, 7] = np.nan, np.inf
    whole, parts = measured("out", got, expected), Distance("out", RULE)
    for part in (slice(0, 10), slice(10, 11), slice(11, 30)):
        later = Distance("out", RULE)
        later.add(pair(got[part], expected[part]), np.arange(30)[part, None])
        parts.merge(later)
    assert parts.metrics() == dataclasses.replace(
        whole.metrics(),
        rel_l2=pytest.approx(whole.rel_l2),
        cosine_difference=pytest.approx(whole.cosine_difference),
    )
    assert parts.worst_at == whole.worst_at


def test_special_values_are_counted_where_only_one_side_has_them():
    got = np.array([np.nan, np.inf, -np.inf, 1.0, np.nan], np.float32)
    expected = np.array([np.nan, 1.0, np.inf, np.nan, 2.0])
    found = measured("lse", got, expected).metrics()
    assert found.special == {"nan": 2, "+inf": 2, "-inf": 1}
    assert found.elements == 0
    assert found.matched == 1.0


def test_skipped_rows_do_not_count():
    distance = Distance("lse", RULE)
    got = np.array([1.0, 5.0], np.float32)
    distance.add(pair(got, np.ones(2), np.array([False, True])), np.arange(2)[:, None])
    assert distance.metrics().max_abs == 0.0
    assert distance.metrics().elements == 1


def test_the_worst_element_is_the_one_furthest_outside_flashmlas_rule():
    expected = np.array([[100.0, 1.0, 0.0], [0.01, 1.0, 1.0]])
    got = expected + np.array([[1.0, 0.0, 7e-4], [0.0, 0.1, 0.0]])  # of 100 1 % is within
    distance = measured("out", got.astype(BFLOAT16), expected)
    assert distance.worst_at == (1, 1)
    assert distance.worst_use > 1.0
    assert distance.metrics().matched == pytest.approx(5 / 6)


def test_a_zero_tensor_has_no_relative_error_but_an_error_beside_it_has():
    assert measured("lse", np.zeros(3, np.float32), np.zeros(3)).rel_l2 == 0.0
    assert measured("lse", np.ones(3, np.float32), np.zeros(3)).rel_l2 == math.inf
    assert measured("lse", np.ones(3, np.float32), np.zeros(3)).cosine_difference == 0.0
