"""The judge of sparse prefill as a whole: form, tolerances, three ways, rows, notes."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from compare.judging import evidence as evidence_module
from compare.judging.attention import evidence_of, judge
from compare.protocol.verdict import Status

BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture
def inputs(inputs_of):
    return inputs_of("s_q=6,s_kv=200,h=4,topk=96,sink=mixed,length=ragged,invalid=0.1,seed=11")


@pytest.fixture
def right(inputs, yardstick_of):
    return yardstick_of(inputs)


def changed(result, tensor: str, place, factor: float):
    array = getattr(result, tensor).copy()
    array[place] = (array[place].astype(np.float64) * factor).astype(array.dtype)
    return dataclasses.replace(result, **{tensor: array})


def ordinary_row(inputs, right) -> tuple[int, int]:
    """The row with the most keys whose out isn't 0."""
    seen = np.abs(right.out.astype(np.float32)).max(axis=2)
    token = int(np.where(seen.max(axis=1) > 0, inputs.topk_length, -1).argmax())
    return token, int(seen[token].argmax())


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"out": np.zeros((6, 4, 576), BFLOAT16)}, Status.SHAPE, "[6, 4, 576]; [6, 4, 512] is due"),
        ({"lse": np.zeros((4, 6), np.float32)}, Status.SHAPE, "lse has the shape [4, 6]; [6, 4]"),
        ({"max_logits": np.zeros((6, 4, 1), np.float32)}, Status.SHAPE, "max_logits"),
        ({"out": np.zeros((6, 4, 512), np.float16)}, Status.DTYPE, "float16; bfloat16 is due"),
        ({"lse": np.zeros((6, 4))}, Status.DTYPE, "lse is float64; float32 is due"),
    ],
)
def test_shapes_and_dtypes_come_first(inputs, right, fields, status, said):
    verdict = judge(inputs, dataclasses.replace(right, **fields))
    assert verdict.status is status
    assert said in verdict.reason


def test_a_right_result_passes_and_uses_less_than_its_bound(inputs, right):
    verdict = judge(inputs, right)
    assert verdict.status is Status.PASS
    assert verdict.reason == ""
    assert verdict.share is not None
    assert 0.1 < verdict.share <= 0.5  # the yardstick's own error is half of the bound
    assert verdict.rows_judged == verdict.rows_total == 24
    assert verdict.against_oracle == verdict.torch_against_oracle


@pytest.mark.parametrize(("tensor", "factor"), [("out", 1.03), ("lse", 1 + 2e-5)])
def test_one_wrong_row_fails_with_its_place_and_both_values(inputs, right, tensor, factor):
    row = ordinary_row(inputs, right)
    wrong = changed(right, tensor, row, factor)
    verdict = judge(inputs, wrong)
    assert verdict.status is Status.NUMERIC
    (worst,) = verdict.worst
    assert (worst.tensor, worst.index[:2]) == (tensor, row)
    assert worst.share > 1.0
    assert worst.got == float(getattr(wrong, tensor)[worst.index])
    place = ", ".join(map(str, worst.index))
    assert f"{tensor}[{place}] is" in verdict.reason
    assert "allowed is" in verdict.reason


def test_a_small_error_in_every_row_fails_as_a_whole(inputs_of, yardstick_of):
    inputs = inputs_of("s_q=8,s_kv=300,h=16,topk=256,data=flat,seed=3")
    wrong = changed(yardstick_of(inputs), "out", ..., 1 + 2**-7)
    verdict = judge(inputs, wrong)
    assert verdict.status is Status.NUMERIC
    assert verdict.shares["out tensor"] > 1.0


def test_max_logits_may_be_left_out_and_is_said_so(inputs, right):
    verdict = judge(inputs, dataclasses.replace(right, max_logits=None))
    assert verdict.status is Status.PASS
    assert verdict.not_compared == ("max_logits",)
    assert "max_logits" not in verdict.against_oracle


def test_candidate_and_reference_are_compared_too(inputs, right):
    token, head = ordinary_row(inputs, right)
    nudged = changed(right, "lse", (token, head), 1 + 2**-23)
    verdict = judge(inputs, nudged, right)
    assert verdict.status is Status.PASS
    assert verdict.against_reference["lse"].ulp[2] == 1.0
    assert verdict.against_reference["out"].max_abs == 0.0
    assert verdict.reference_against_oracle == verdict.torch_against_oracle


def test_a_wrong_reference_is_named_and_the_candidate_judged_by_the_oracle(inputs, right):
    wrong = changed(right, "lse", ordinary_row(inputs, right), 1.4427)
    for profile in ("calibrated", "flashmla", "both"):
        verdict = judge(inputs, right, wrong, profile=profile)
        assert verdict.reference_failed is not None
        assert "lse[" in verdict.reference_failed
    assert judge(inputs, right, wrong).status is Status.PASS


def test_a_reference_of_another_shape_is_a_failed_reference(inputs, right):
    wrong = dataclasses.replace(right, lse=right.lse.T.copy())
    verdict = judge(inputs, right, wrong)
    assert verdict.status is Status.PASS
    assert verdict.reference_failed == "lse has the shape [4, 6]; [6, 4] is due"


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_some_rows_of_out_are_enough(inputs, right, side):
    rows = np.array([22, 3, 8, 9])
    part = dataclasses.replace(right, out=right.out.reshape(24, 512)[rows], out_rows=rows)
    pair = (right, part) if side == "reference" else (part, right)
    verdict = judge(inputs, *pair)
    assert verdict.status is Status.PASS
    assert verdict.against_reference["out"].elements == 4 * 512
    assert verdict.against_reference["out"].max_abs == 0.0
    assert verdict.against_reference["lse"].elements == 24
    token, head = divmod(8, 4)
    wrong = dataclasses.replace(part, out=part.out * BFLOAT16(-1))
    if side == "candidate":
        verdict = judge(inputs, wrong, right)
        assert verdict.status is Status.NUMERIC
        assert verdict.worst[0].index[0] * 4 + verdict.worst[0].index[1] in rows
    else:
        assert judge(inputs, right, wrong).reference_failed is not None
    assert token == 2
    assert head == 0


def test_rows_must_be_distinct_and_there(inputs, right):
    rows = np.array([1, 1])
    part = dataclasses.replace(right, out=right.out.reshape(24, 512)[rows], out_rows=rows)
    assert judge(inputs, part).status is Status.SHAPE


class TestBeyondTheOraclesLimit:
    """With more work than the oracle may do it judges some rows, and one wrong row still fails."""

    @pytest.fixture(autouse=True)
    def small_limit(self, monkeypatch):
        monkeypatch.setattr(evidence_module, "EVERY_ROW_FLOP", 0.0)
        monkeypatch.setattr(evidence_module, "SAMPLED_TOKENS", 5)
        monkeypatch.setattr("compare.judging.side_by_side.MOST_DIFFERENT", 3)

    @pytest.fixture
    def inputs(self, inputs_of):
        return inputs_of("s_q=60,s_kv=100,h=2,topk=40,invalid=0.1,empty_rows=4,seed=2")

    @pytest.fixture
    def unseen(self, inputs) -> int:
        """A token with keys that the sample leaves out."""
        evidence = evidence_of(inputs)
        full = ~evidence.witness.keys.rows(np.arange(60)).empty
        return int(np.setdiff1d(np.flatnonzero(full), evidence.sample)[7])

    def test_the_number_of_rows_is_said(self, inputs, right):
        verdict = judge(inputs, right)
        assert (verdict.rows_judged, verdict.rows_total) == (10, 120)
        assert verdict.status is Status.PASS

    @pytest.mark.parametrize("tensor", ["out", "lse", "max_logits"])
    def test_one_wrong_row_that_no_sample_holds_fails(self, inputs, right, unseen, tensor):
        verdict = judge(inputs, changed(right, tensor, (unseen, 1), 1.03), right)
        assert verdict.status is Status.NUMERIC
        assert verdict.worst[0].index[:2] == (unseen, 1)
        assert 10 < verdict.rows_judged < 120

    def test_one_wrong_row_of_the_reference_is_its_failure(self, inputs, right, unseen):
        verdict = judge(inputs, right, changed(right, "out", (unseen, 1), 1.03))
        assert verdict.status is Status.PASS
        assert verdict.reference_failed is not None

    def test_a_special_value_is_seen_in_any_row(self, inputs, right, unseen):
        verdict = judge(inputs, changed(right, "out", (unseen, 0, 9), math.nan))
        assert verdict.status is Status.SPECIAL


def test_flashmla_is_the_element_rule_of_its_tests(inputs_of, yardstick_of):
    inputs = inputs_of("s_q=6,s_kv=200,h=4,topk=96,data=flashmla,length=ragged,seed=12")
    right = yardstick_of(inputs)
    assert judge(inputs, right, right, profile="both").status is Status.PASS
    out = right.out.astype(np.float32)
    token, head = ordinary_row(inputs, right)
    column = int(np.abs(out[token, head]).argmin())
    within, outside = out.copy(), out.copy()
    within[token, head, column] += 7e-4  # abs 8e-4 is allowed however small the value is
    outside[token, head, column] += 9e-4
    allowed = dataclasses.replace(right, out=within.astype(BFLOAT16))
    assert judge(inputs, allowed, profile="flashmla").status is Status.PASS
    wrong = dataclasses.replace(right, out=outside.astype(BFLOAT16))
    verdict = judge(inputs, wrong, profile="flashmla")
    assert verdict.status is Status.NUMERIC
    assert verdict.worst[0].index == (token, head, column)
    assert "FlashMLA's tests allow abs 0.0008" in verdict.reason


def test_both_says_whose_rule_was_broken(inputs_of, yardstick_of):
    inputs = inputs_of("s_q=6,s_kv=200,h=4,topk=96,data=flashmla,seed=12")
    right = yardstick_of(inputs)
    # 30 ulp: the calibrated bound is tighter than FlashMLA's 2e-4, relatively.
    nudged = changed(right, "lse", ..., 1 + 30 * 2**-23)
    assert judge(inputs, nudged, profile="flashmla").status is Status.PASS
    verdict = judge(inputs, nudged, profile="both")
    assert verdict.status is Status.NUMERIC
    assert "calibrated: lse" in verdict.reason
    assert "flashmla:" not in verdict.reason


def test_flashmlas_numbers_are_said_to_be_for_its_own_data(inputs, right):
    (note,) = judge(inputs, right, profile="both").notes
    assert "made for its own data" in note


def test_an_unknown_profile_is_refused(inputs, right):
    with pytest.raises(ValueError, match="profile: 'strict'; accepted are calibrated"):
        judge(inputs, right, profile="strict")


def test_inputs_of_which_no_row_is_defined_are_no_pass(inputs, right):
    keys = np.full_like(inputs.kv, np.inf)
    ended = {"topk_length": None, "attn_sink": None}
    verdict = judge(dataclasses.replace(inputs, kv=keys, **ended), right, right)
    assert (verdict.status, verdict.rows_judged) == (Status.UNSUPPORTED, 0)
    assert "no row could be compared" in verdict.reason


def test_without_a_token_nothing_is_compared(inputs_of, yardstick_of):
    inputs = inputs_of("s_q=0,s_kv=9,h=2,topk=8")
    empty = np.zeros((0, 2), np.float32)
    from compare.judging.attention_call import SparsePrefillResult

    result = SparsePrefillResult(
        out=np.zeros((0, 2, 512), BFLOAT16), max_logits=empty, lse=empty.copy()
    )
    verdict = judge(inputs, result, result)
    assert verdict.status is Status.UNSUPPORTED
    assert "there was nothing to compare: the case has no rows" in verdict.reason
    wrong = SparsePrefillResult(out=np.zeros((0, 1, 512), BFLOAT16), lse=empty)
    assert judge(inputs, wrong).status is Status.SHAPE


class TestExactData:
    @pytest.fixture
    def inputs(self, inputs_of):
        return inputs_of("s_q=5,s_kv=256,h=4,topk=64,data=exact,seed=21")

    def test_right_results_are_bit_equal(self, inputs, right):
        assert judge(inputs, right).status is Status.PASS

    def test_one_ulp_in_out_fails(self, inputs, right):
        bits = right.out.copy().view(np.uint16)
        place = tuple(np.argwhere(np.abs(right.out.astype(np.float32)) > 1)[0])
        bits[place] += 1
        verdict = judge(inputs, dataclasses.replace(right, out=bits.view(BFLOAT16)))
        assert verdict.status is Status.NUMERIC
        assert verdict.worst[0].index == place
        assert "1 bfloat16 ulp off, allowed is none" in verdict.reason

    def test_lse_may_be_two_ulp_off_and_no_more(self, inputs, right):
        place = tuple(np.argwhere(right.lse > 1)[0])
        assert judge(inputs, changed(right, "lse", place, 1 + 2**-23)).status is Status.PASS
        assert judge(inputs, changed(right, "lse", place, 1 + 2**-20)).status is Status.NUMERIC

    def test_a_missing_key_is_named(self, inputs, yardstick_of):
        evidence = evidence_of(inputs)
        right = evidence.oracle(np.arange(5))
        token = int(np.exp(right.lse[:, 0]).argmax())
        scores = inputs.kv.astype(np.float32) @ inputs.q[token, 0].astype(np.float32)
        slot = int(np.flatnonzero(scores[inputs.indices[token]] == 0)[0])
        indices = inputs.indices.copy()
        indices[token, slot] = -1
        dropped = yardstick_of(dataclasses.replace(inputs, indices=indices))
        verdict = judge(inputs, dropped)
        assert verdict.status is Status.NUMERIC
        assert "lacks key" in verdict.reason
        assert f"key {inputs.indices[token, slot]} of slot" in verdict.reason


def test_a_sink_that_cannot_be_seen_is_noted(inputs_of, yardstick_of):
    # cases.md S2: with this many equal keys a sink of 0 changes nothing in bfloat16.
    inputs = inputs_of("s_q=2,s_kv=4096,h=2,topk=4096,data=flat,sink=zero,seed=1")
    (note,) = judge(inputs, yardstick_of(inputs)).notes
    assert "the sink changes no row" in note
    seen = dataclasses.replace(inputs, attn_sink=np.array([0.0, 6.0], np.float32))
    assert judge(seen, yardstick_of(seen)).notes == ()


def test_repeated_keys_are_noted(inputs_of, yardstick_of):
    inputs = inputs_of("s_q=2,s_kv=300,h=2,topk=64,order=dup,seed=1")
    (note,) = judge(inputs, yardstick_of(inputs)).notes
    assert note == "2 token rows name a key more than once, up to 2 times; each time counts"


def test_notes_of_both_results_are_kept(inputs, right):
    noted = dataclasses.replace(right, notes=("heads padded to 64",))
    assert judge(inputs, noted).notes == ("heads padded to 64",)
    assert judge(inputs, right, noted).notes == ("reference: heads padded to 64",)
