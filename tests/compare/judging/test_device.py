"""Blocks on their way to the device, and what is counted of them there."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from compare.judging import device, evidence
from compare.judging.attention import evidence_of, judge
from compare.judging.histogram import Histogram

BFLOAT16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("tokens", [[2, 3, 4], [4, 2, 3], [1, 3], [3, 3], [0], []])
def test_rows_are_those_of_fancy_indexing_and_neighbours_are_a_view(tokens):
    array = np.arange(24).reshape(6, 4)
    found = device.rows_at(array, np.array(tokens, np.int64))
    np.testing.assert_array_equal(found, array[tokens] if tokens else array[:0])
    neighbours = tokens in ([2, 3, 4], [0])
    assert np.shares_memory(found, array) == neighbours


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32, np.int32])
def test_an_array_of_any_strides_arrives_with_its_dtype_and_values(dtype):
    array = np.arange(60).reshape(5, 12).astype(dtype)[::2, 1:9]
    array.flags.writeable = False
    there = device.upload(array, "cpu")
    assert there.shape == (3, 8)
    assert device.to_numpy(there).dtype == dtype
    np.testing.assert_array_equal(device.to_numpy(there), array)


def test_what_is_read_only_is_never_shared():
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    device.upload(array, None).add_(1.0)
    assert (array == 0.0).all()


def test_a_gpu_gets_larger_blocks_than_a_processor_cache_holds():
    assert device.block_elements("cuda:1") > device.block_elements(None)
    assert device.block_elements("cpu") == device.block_elements(None)


@pytest.mark.parametrize(("heads", "topk", "tokens"), [(2, 16, 256), (1, 4096, 64)])
def test_a_block_is_as_large_as_out_or_the_indices_allow(inputs_of, heads, topk, tokens):
    inputs = inputs_of(f"s_q=1,s_kv=60,h={heads},topk={topk}")
    assert evidence_of(inputs, "cpu").step == tokens


def test_a_histogram_of_many_small_blocks_is_that_of_one_large():
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 900, 1_300_000))
    whole, parts = Histogram(), Histogram()
    whole.add(values)
    for part in values.split(9_000):
        later = Histogram()
        later.add(part)
        parts.merge(later)
    exact = np.quantile(values.numpy(), [0.5, 0.99], method="inverted_cdf")
    assert whole.quantiles(0.5, 0.99) == parts.quantiles(0.5, 0.99) == tuple(exact)


@pytest.mark.parametrize("every_row", [True, False])
def test_a_verdict_does_not_depend_on_the_size_of_blocks(
    inputs_of, yardstick_of, monkeypatch, every_row
):
    """A GPU's blocks are larger, the rest is the same."""
    inputs = inputs_of("s_q=300,s_kv=60,h=3,topk=16,sink=mixed,length=ragged,empty_rows=2,seed=2")
    right = yardstick_of(inputs)
    out = right.out.copy()
    out[7, 1, 3], out[211, 2] = np.nan, 0.0
    damaged = dataclasses.replace(right, out=out)
    if not every_row:
        monkeypatch.setattr(evidence, "EVERY_ROW_FLOP", 1.0)

    def verdict(elements: int):
        for module in (evidence, device):
            monkeypatch.setattr(module, "block_elements", lambda device: elements)
        return judge(inputs, damaged, right, profile="both", evidence=evidence_of(inputs, "cpu"))

    small, large = verdict(512 * 3 * 11), verdict(1 << 23)
    assert small.status is large.status
    assert small.status.failed
    assert small.reason == large.reason
    assert small.rows_judged == large.rows_judged
    assert repr(small.worst) == repr(large.worst)  # a NaN isn't equal to itself
    for name in ("against_oracle", "against_reference", "reference_against_oracle"):
        for tensor, metrics in getattr(small, name).items():
            other = dataclasses.asdict(getattr(large, name)[tensor])
            for field, value in dataclasses.asdict(metrics).items():
                assert other[field] == (
                    value
                    if field in ("special", "elements")
                    else pytest.approx(value, rel=1e-9, abs=1e-13)
                )
