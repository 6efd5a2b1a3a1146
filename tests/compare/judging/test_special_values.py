"""Special values are judged exactly, in every row, before any tolerance."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from compare.judging.attention import judge
from compare.judging.row_kinds import KeyFacts, most_copies
from compare.protocol.verdict import Status
from compare.report.text import worst_place

WORDS = "s_q=4,s_kv=60,h=3,topk=40,sink=0.5,length=ragged,invalid=0.2,empty_rows=1,seed=5"


@pytest.fixture
def inputs(inputs_of):
    return inputs_of(WORDS)


@pytest.fixture
def right(inputs, yardstick_of):
    return yardstick_of(inputs)


@pytest.fixture
def empty(inputs) -> int:
    """The token without a valid slot."""
    (token,) = np.flatnonzero(KeyFacts(inputs).rows(np.arange(4)).empty)
    return int(token)


def verdict_with(inputs, result, tensor: str, place, value):
    """The verdict on `result` with one value changed."""
    changed = getattr(result, tensor).copy()
    changed[place] = value
    return judge(inputs, dataclasses.replace(result, **{tensor: changed}))


def test_the_right_result_passes(inputs, right):
    assert judge(inputs, right).status is Status.PASS


@pytest.mark.parametrize(
    ("tensor", "value", "due"),
    [
        ("out", 1e-30, "0 is due"),
        ("out", math.nan, "0 is due"),
        ("lse", 0.0, "+inf is due"),
        ("lse", math.nan, "+inf is due"),
        ("max_logits", -1e30, "-inf is due"),
        ("max_logits", math.inf, "-inf is due"),
    ],
)
def test_an_empty_row_has_its_values_exactly(inputs, right, empty, tensor, value, due):
    place = (empty, 1, 7)[: getattr(right, tensor).ndim]
    verdict = verdict_with(inputs, right, tensor, place, value)
    assert verdict.status is Status.SPECIAL
    assert due in verdict.reason
    assert verdict.worst[0].tensor == tensor
    assert verdict.worst[0].index == place
    assert verdict.diagnosis == ()


def test_minus_zero_is_zero(inputs, right, empty):
    assert verdict_with(inputs, right, "out", empty, -0.0).status is Status.PASS


def test_an_lse_of_minus_inf_in_empty_rows_is_named(inputs, right, empty):
    verdict = verdict_with(inputs, right, "lse", empty, -math.inf)
    assert verdict.status is Status.SPECIAL
    assert [found.name for found in verdict.diagnosis] == ["empty-lse-minus-inf"]


@pytest.mark.parametrize("tensor", ["out", "lse", "max_logits"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_keys_is_finite(inputs, right, empty, tensor, value):
    place = ((empty + 1) % 4, 2, 100)[: getattr(right, tensor).ndim]
    verdict = verdict_with(inputs, right, tensor, place, value)
    assert verdict.status is Status.SPECIAL
    assert f"{tensor}[{', '.join(map(str, place))}] is {value:g}; a finite value is due" in (
        verdict.reason
    )
    assert verdict.worst[0].expected is None
    assert worst_place(verdict.worst[0]).endswith(f"got {value:g}, expected a finite value")
    assert sum(verdict.against_oracle[tensor].special.values()) == 1


def test_a_nan_in_q_is_due_in_its_row_alone(inputs, yardstick_of, empty):
    token = (empty + 1) % 4
    q = inputs.q.copy()
    q[token, 1, 3] = math.nan
    poisoned = dataclasses.replace(inputs, q=q)
    result = yardstick_of(poisoned)
    assert judge(poisoned, result).status is Status.PASS
    hidden = verdict_with(poisoned, result, "out", (token, 1), 0.0)
    assert hidden.status is Status.SPECIAL
    assert "NaN is due" in hidden.reason
    assert verdict_with(poisoned, result, "lse", (token, 1), 1.0).status is Status.SPECIAL
    spread = verdict_with(poisoned, result, "lse", (token, 0), math.nan)
    assert "a finite value is due" in spread.reason


def test_max_logits_is_not_compared_where_a_score_is_nan(inputs, yardstick_of, empty):
    token = (empty + 1) % 4
    kv = inputs.kv.copy()
    valid = KeyFacts(inputs).valid(np.array([token]))[0]
    kv[inputs.indices[token][valid][0], 5] = math.nan
    poisoned = dataclasses.replace(inputs, kv=kv)
    result = yardstick_of(poisoned)
    for value in (-6.93e29, 17.0, math.nan):  # CUDA's fmax drops a NaN; all of them: -1e30 ln 2
        verdict = verdict_with(poisoned, result, "max_logits", token, value)
        assert verdict.status is Status.PASS


def test_a_sink_of_plus_inf_makes_rows_exactly_zero(inputs, yardstick_of, empty):
    sunk = dataclasses.replace(inputs, attn_sink=np.array([0.5, math.inf, -math.inf], np.float32))
    result = yardstick_of(sunk)
    assert judge(sunk, result).status is Status.PASS
    verdict = verdict_with(sunk, result, "out", ((empty + 1) % 4, 1, 0), 1e-20)
    assert verdict.status is Status.SPECIAL
    assert "0 is due: the sink is +inf" in verdict.reason


def test_a_nan_sink_makes_out_nan_except_in_empty_rows(inputs, yardstick_of, empty):
    sunk = dataclasses.replace(inputs, attn_sink=np.full(3, math.nan, np.float32))
    result = yardstick_of(sunk)
    assert judge(sunk, result).status is Status.PASS
    assert verdict_with(sunk, result, "out", (empty, 0), math.nan).status is Status.SPECIAL


def test_what_only_padding_names_is_never_looked_at(inputs, right):
    kv = inputs.kv.copy()
    facts = KeyFacts(inputs)
    tokens = np.arange(4)
    used = inputs.indices[facts.valid(tokens)]
    kv[np.setdiff1d(np.arange(60), used)] = math.nan
    assert judge(dataclasses.replace(inputs, kv=kv), right).status is Status.PASS


def test_infinite_inputs_are_left_out_and_said_so(inputs, yardstick_of, empty):
    token = (empty + 1) % 4
    q = inputs.q.copy()
    q[token, 1, 3] = math.inf
    outside = dataclasses.replace(inputs, q=q)
    verdict = verdict_with(outside, yardstick_of(outside), "out", (token, 1), 3.0)
    assert verdict.status is Status.PASS
    assert any("1 rows have infinite inputs" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("row", "copies"),
    [([3, 3, 5], 2), ([-1, -1, -1, 4], 1), ([2, 7, 2, 7, 2], 3), ([-1, -7], 0), ([], 0)],
)
def test_copies_of_a_key_are_counted(row, copies):
    assert most_copies(torch.tensor([row], dtype=torch.int32)).tolist() == [copies]


def test_a_signalling_nan_is_a_nan(inputs, right, empty):
    bits = right.out.copy().view(np.uint16)
    bits[(empty + 1) % 4, 0, 0] = 0x7F81
    verdict = judge(inputs, dataclasses.replace(right, out=bits.view(ml_dtypes.bfloat16)))
    assert verdict.status is Status.SPECIAL
