"""Faults are named from the tensors: the right name, both where two fit, and none for noise."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from compare.judging.attention import judge
from compare.protocol.verdict import Status

WORDS = "s_q=6,s_kv=200,h=8,d=576,topk=96,sink=mixed,length=ragged,invalid=0.2,empty_rows=1,seed=31"


@pytest.fixture
def inputs(inputs_of):
    return inputs_of(WORDS)


@pytest.fixture
def right(inputs, yardstick_of):
    return yardstick_of(inputs)


def names(inputs, result) -> list[str]:
    verdict = judge(inputs, result)
    assert verdict.status.failed
    return [found.name for found in verdict.diagnosis]


def test_two_faults_in_different_tensors_are_both_named(inputs, right, yardstick_of):
    without_sink = yardstick_of(dataclasses.replace(inputs, attn_sink=None))
    both = dataclasses.replace(right, out=without_sink.out, lse=right.lse / np.float32(math.log(2)))
    assert sorted(names(inputs, both)) == ["lse-base-2", "sink-omitted"]


def test_the_base_of_lse_is_named_although_out_is_garbage(inputs, right):
    garbage = np.random.default_rng(0).permuted(right.out.view(np.uint16), axis=2)
    result = dataclasses.replace(
        right, out=garbage.view(right.out.dtype), lse=right.lse / np.float32(math.log(2))
    )
    assert names(inputs, result) == ["lse-base-2"]


def test_an_lse_that_was_taken_for_base_2_is_named(inputs, right):
    scaled = dataclasses.replace(right, lse=right.lse * np.float32(math.log(2)))
    assert names(inputs, scaled) == ["lse-times-ln-2"]


def test_noise_gets_no_name(inputs, right):
    rng = np.random.default_rng(1)
    noisy = right.out.astype(np.float32) * rng.normal(1, 0.1, right.out.shape)
    lse = right.lse + rng.normal(0, 0.1, right.lse.shape).astype(np.float32)
    assert names(inputs, dataclasses.replace(right, out=noisy.astype(right.out.dtype))) == []
    assert names(inputs, dataclasses.replace(right, lse=lse)) == []


def test_an_out_of_zeros_is_named(inputs, right):
    assert names(inputs, dataclasses.replace(right, out=right.out * 0)) == ["out-all-zero"]


@pytest.mark.parametrize("step", [-1, 1])
def test_rows_of_a_neighbouring_token_are_named(inputs, right, step):
    filled = dataclasses.replace(
        inputs, indices=np.abs(inputs.indices % 200), topk_length=None, attn_sink=None
    )
    from compare.judging.attention import evidence_of

    (rows,) = evidence_of(filled).blocks(np.arange(6))
    shifted = dataclasses.replace(
        right,
        out=np.roll(rows.torch_out, step, axis=0),
        lse=np.roll(rows.torch_lse, step, axis=0),
        max_logits=np.roll(rows.torch_max_logits, step, axis=0),
    )
    assert names(filled, shifted) == ["neighbour-token-rows"]


def test_heads_in_any_other_order_are_named(inputs, right):
    order = np.array([3, 0, 1, 2, 7, 6, 5, 4])
    permuted = dataclasses.replace(
        right,
        out=right.out[:, order],
        lse=right.lse[:, order],
        max_logits=right.max_logits[:, order],
    )
    assert names(inputs, permuted) == ["heads-permuted"]


@pytest.mark.parametrize("shift", [1, 5])
def test_a_rotation_is_told_with_its_distance(inputs, right, shift):
    rolled = dataclasses.replace(
        right,
        out=np.roll(right.out, shift, axis=1),
        lse=np.roll(right.lse, shift, axis=1),
        max_logits=np.roll(right.max_logits, shift, axis=1),
    )
    verdict = judge(inputs, rolled)
    assert [found.name for found in verdict.diagnosis] == ["heads-rotated"]
    assert f"(h - {shift}) mod 8 in every output" in verdict.diagnosis[0].sentence


def test_statistics_alone_may_be_rotated(inputs, right):
    rolled = dataclasses.replace(
        right, lse=np.roll(right.lse, 2, axis=1), max_logits=np.roll(right.max_logits, 2, axis=1)
    )
    verdict = judge(inputs, rolled)
    assert [found.name for found in verdict.diagnosis] == ["heads-rotated"]
    assert "in lse and max_logits, not in out" in verdict.diagnosis[0].sentence


def test_an_lse_that_was_reshaped_instead_of_transposed_is_named(inputs, right):
    reshaped = right.lse.T.reshape(right.lse.shape).copy()
    verdict = judge(inputs, dataclasses.replace(right, lse=reshaped))
    assert "lse-transposed" in [found.name for found in verdict.diagnosis]


def test_two_faults_that_these_inputs_cannot_tell_apart_are_both_flagged(inputs_of, yardstick_of):
    # The length leaves out the last slot alone: ignoring it is the same as one slot too many.
    inputs = inputs_of("s_q=3,s_kv=100,h=4,topk=32,length=31,seed=4")
    wrong = yardstick_of(dataclasses.replace(inputs, topk_length=None))
    verdict = judge(inputs, wrong)
    assert sorted(found.name for found in verdict.diagnosis) == [
        "length-ignored",
        "length-off-by-one",
    ]
    assert all("these inputs can't tell" in found.sentence for found in verdict.diagnosis)


def test_one_slot_too_few_is_named(inputs, yardstick_of):
    shorter = dataclasses.replace(inputs, topk_length=np.maximum(inputs.topk_length - 1, 0))
    verdict = judge(inputs, yardstick_of(shorter))
    assert [found.name for found in verdict.diagnosis] == ["length-off-by-one"]
    assert "too few" in verdict.diagnosis[0].sentence


def test_a_right_result_has_no_diagnosis(inputs, right):
    assert judge(inputs, right).diagnosis == ()
    assert judge(inputs, right).status is Status.PASS
