"""The judge of DCP decode: form, special values, bounds, parts and merges, exact data, profiles."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch

import compare
from compare.judging.elements import round_to_bfloat16
from compare.judging.evidence import Evidence
from compare.judging.sides import share_by_tensor
from compare.protocol.verdict import Status, Verdict
from compare.suites.dcp_decode import tolerance as decode_tolerance
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.judge import contract_of, evidence_of, judge, side_of
from compare.suites.table import make_inputs, parse_case

RAGGED = (
    "dcp-decode:lens=61+43+2,q=5+2+1,h=3,page=16,world=2,rank=1,interleave=2,pad_rows=2,stale=1"
)
EMPTY_ROW, PADDED_ROW = 7, 9  # of RAGGED: two keys lie on rank 0 alone
MERGED = "dcp-decode:lens=61+43+2,q=5+2+1,h=3,page=16,world=4,rank=all,interleave=2,pad_rows=2"
EXACT = "dcp-decode:lens=300+97,q=8+2,h=6,world=2,rank=1,data=exact"
EXACT_MERGED = "dcp-decode:lens=300+97,q=8+2,h=6,world=4,rank=all,data=exact"


def inputs_of(case: str) -> DcpDecodeInputs:
    inputs = make_inputs(parse_case(case))
    assert isinstance(inputs, DcpDecodeInputs)
    return inputs


def bfloat16(values: np.ndarray) -> np.ndarray:
    rounded = round_to_bfloat16(torch.from_numpy(np.ascontiguousarray(values)))
    return rounded.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def right(evidence: Evidence, **changes) -> DcpDecodeResult:
    """The oracle, rounded once."""
    rows = evidence.oracle(np.arange(evidence.num_tokens))
    result = DcpDecodeResult(out=bfloat16(rows.out), lse=rows.lse.astype(np.float32))
    return dataclasses.replace(result, **changes)


def changed(array: np.ndarray, place, value) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


def judged(evidence: Evidence, result: DcpDecodeResult, **options) -> Verdict:
    return judge(evidence.inputs, result, evidence=evidence, **options)


@pytest.fixture(scope="module")
def ragged() -> Evidence:
    return evidence_of(inputs_of(RAGGED))


@pytest.fixture(scope="module")
def merged() -> Evidence:
    return evidence_of(inputs_of(MERGED))


@pytest.fixture(scope="module", params=[EXACT, EXACT_MERGED])
def exact(request: pytest.FixtureRequest) -> Evidence:
    return evidence_of(inputs_of(request.param))


@pytest.mark.parametrize("case", [RAGGED, MERGED, EXACT, EXACT_MERGED])
def test_the_oracle_rounded_passes(case: str):
    evidence = evidence_of(inputs_of(case))
    verdict = judged(evidence, right(evidence), reference=right(evidence))
    assert verdict.status is Status.PASS, verdict.reason
    assert verdict.reference_failed is None
    assert verdict.rows_judged == verdict.rows_total == evidence.num_tokens * evidence.heads
    assert set(verdict.torch_against_oracle) == {"out", "lse"}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"out": np.zeros((10, 3, 511), ml_dtypes.bfloat16)}, Status.SHAPE),
        ({"out": np.zeros((8, 3, 512), ml_dtypes.bfloat16)}, Status.SHAPE),
        ({"lse": np.zeros((3, 10), np.float32)}, Status.SHAPE),
        ({"out": np.zeros((10, 3, 512), np.float32)}, Status.DTYPE),
        ({"lse": np.zeros((10, 3), np.float64)}, Status.DTYPE),
        ({"out_rows": np.array([0, 0])}, Status.SHAPE),
    ],
)
def test_form_comes_first(ragged: Evidence, changes, status):
    verdict = judged(ragged, right(ragged, **changes))
    assert verdict.status is status
    assert "due" in verdict.reason or "must be" in verdict.reason


@pytest.mark.parametrize("row", [EMPTY_ROW, PADDED_ROW])
def test_a_row_without_keys_has_out_0_and_lse_minus_inf_exactly(ragged: Evidence, row: int):
    result = right(ragged)
    assert (result.lse[row] == -math.inf).all()
    assert (result.out[row] == 0).all()
    tiny = changed(result.out, (row, 1, 7), 1e-30)
    verdict = judged(ragged, right(ragged, out=tiny))
    assert verdict.status is Status.SPECIAL
    assert "; 0 is due: the row sees no key on this rank" in verdict.reason
    for value in (math.inf, 0.0, -1e30, math.nan):
        verdict = judged(ragged, right(ragged, lse=changed(result.lse, (row, 2), value)))
        assert verdict.status is Status.SPECIAL
        assert "-inf is due: the row sees no key on this rank" in verdict.reason


def test_the_other_empty_lse_is_named_as_undeclared(ragged: Evidence):
    lse = right(ragged).lse
    verdict = judged(ragged, right(ragged, lse=np.where(lse == -math.inf, math.inf, lse)))
    assert verdict.status is Status.SPECIAL
    assert verdict.diagnosis[0].name == "empty-lse-plus-inf"
    assert "undeclared empty-lse convention" in verdict.diagnosis[0].sentence


def test_a_row_with_keys_is_finite(ragged: Evidence):
    for value in (math.nan, math.inf, -math.inf):
        verdict = judged(ragged, right(ragged, lse=changed(right(ragged).lse, (3, 0), value)))
        assert verdict.status is Status.SPECIAL
        verdict = judged(ragged, right(ragged, out=changed(right(ragged).out, (3, 0, 9), value)))
        assert verdict.status is Status.SPECIAL
        assert "a finite value is due" in verdict.reason


def test_nan_is_due_where_a_nan_is_seen_and_nowhere_else():
    inputs = inputs_of(RAGGED)
    cache, q = inputs.kv_cache.copy(), inputs.q.copy()
    q[0, 1, 3] = np.nan
    # The last key that request 1 has on this rank; its first token doesn't reach it.
    last = int(inputs.seq_lens[1]) - 1
    cache[inputs.block_table[1, last // 16], last % 16, 100] = np.nan
    evidence = evidence_of(dataclasses.replace(inputs, q=q, kv_cache=cache))
    keys = evidence.witness.keys.keys
    assert keys[6] == last + 1
    result = right(evidence)
    due = np.isnan(result.lse)
    assert due[0].tolist() == [False, True, False]
    assert due[6].all()
    assert judged(evidence, result).status is Status.PASS
    for place in ((0, 1), (6, 2)):
        clean = judged(evidence, right(evidence, lse=changed(result.lse, place, 1.0)))
        assert clean.status is Status.SPECIAL
        assert "NaN is due: a NaN in q or in a" in clean.reason
        zeros = judged(evidence, right(evidence, out=changed(result.out, place, 0.0)))
        assert zeros.status is Status.SPECIAL


def test_a_nan_behind_a_rows_last_key_leaves_it_undefined():
    inputs = inputs_of("dcp-decode:lens=9,q=3,h=2,page=16")
    cache = inputs.kv_cache.copy()
    cache[inputs.block_table[0, 0], 8, 100] = np.nan
    evidence = evidence_of(dataclasses.replace(inputs, kv_cache=cache))
    result = right(evidence)
    assert np.isnan(result.lse[2]).all()
    leaks = right(evidence, lse=changed(result.lse, (0, 0), math.nan))
    verdict = judged(evidence, leaks)
    assert verdict.status is Status.PASS
    assert verdict.notes[0].startswith("4 rows have infinite inputs")


def test_one_wrong_row_fails(ragged: Evidence):
    out = right(ragged).out
    verdict = judged(ragged, right(ragged, out=changed(out, (2, 1), out[2, 0])))
    assert verdict.status is Status.NUMERIC
    assert verdict.worst[0].index[:2] == (2, 1)
    assert "off by up to" in verdict.reason


def test_one_key_too_many_of_many_is_seen_in_lse_and_on_flat_data_in_out():
    evidence = evidence_of(inputs_of("dcp-decode:lens=2000,q=2,h=2,data=flat"))
    one_more = evidence.oracle(np.arange(2), _variant(bound="minus_one"))
    result = DcpDecodeResult(out=bfloat16(one_more.out), lse=one_more.lse.astype(np.float32))
    verdict = judged(evidence, result)
    assert verdict.shares["lse"] > 10
    assert verdict.shares["out"] > 1
    assert [found.name for found in verdict.diagnosis] == ["bound-off-by-one"]


def _variant(**fields):
    from torch_ref import DecodeVariant

    return DecodeVariant(**fields)


def test_a_reference_that_is_wrong_is_named_and_the_oracle_judges(ragged: Evidence):
    off = right(ragged, lse=right(ragged).lse * np.float32(1.01))
    verdict = judged(ragged, right(ragged), reference=off)
    assert verdict.status is Status.PASS
    assert verdict.reference_failed is not None
    assert verdict.reference_failed.startswith("lse[")


def test_recorded_rows_of_out_are_judged_alone(ragged: Evidence):
    result = right(ragged)
    rows = np.array([29, 4, 21])
    out = result.out.reshape(-1, 512)[rows]
    assert judged(ragged, right(ragged, out=out, out_rows=rows)).status is Status.PASS
    wrong = changed(out, (1, 5), 3.0)
    verdict = judged(ragged, right(ragged, out=wrong, out_rows=rows))
    assert verdict.status is Status.NUMERIC
    assert verdict.worst[0].index == (1, 1, 5)


def test_shards_that_arent_the_whole_are_refused(merged: Evidence):
    shards = merged.inputs.shards
    assert shards is not None
    twice = dataclasses.replace(merged.inputs, shards=(*shards[:3], shards[0]))
    with pytest.raises(ValueError, match="shards: out of all ranks merged"):
        judge(twice, right(merged))


def test_inputs_that_nobody_may_be_given_are_refused():
    inputs = inputs_of(RAGGED)
    with pytest.raises(ValueError, match="dcp_rank: 2"):
        evidence_of(dataclasses.replace(inputs, dcp_rank=2))


def test_an_unknown_profile_is_refused(ragged: Evidence):
    with pytest.raises(ValueError, match="profile: 'loose'"):
        judged(ragged, right(ragged), profile="loose")


def with_parts(evidence: Evidence, steps: int = 0) -> DcpDecodeResult:
    """All ranks' oracles rounded to bfloat16, each away from 0 by `steps` more, and merged."""
    parts = evidence.witness.parts(np.arange(evidence.num_tokens))
    whole = evidence.oracle(np.arange(evidence.num_tokens))
    out = np.zeros_like(whole.out)
    for part in parts:
        weight = torch.exp(part.lse - torch.from_numpy(whole.lse)).nan_to_num(0.0).numpy()
        rounded = bfloat16(part.out.numpy())
        bits = rounded.view(np.uint16) + np.uint16(steps) * (rounded != 0)
        out += weight[..., None] * bits.view(ml_dtypes.bfloat16).astype(np.float64)
    return right(evidence, out=bfloat16(out), parts="bfloat16")


def test_parts_in_bfloat16_are_allowed_their_rounding_and_no_more():
    evidence = evidence_of(inputs_of("dcp-decode:lens=4000,q=2,h=2,world=8,rank=all,data=flat"))
    shares = share_by_tensor(evidence, side_of(evidence.inputs, with_parts(evidence)))
    assert shares["out"] < 0.6
    biased = share_by_tensor(evidence, side_of(evidence.inputs, with_parts(evidence, steps=3)))
    assert biased["out"] > 1.0


def test_the_room_for_parts_is_2_to_the_minus_8_of_their_mass_and_given_only_where_due(
    merged: Evidence,
):
    (rows,) = merged.blocks(np.arange(merged.num_tokens))
    parts = merged.witness.parts(np.arange(merged.num_tokens))
    mass = sum(
        torch.exp(part.lse - torch.from_numpy(rows.lse)).nan_to_num(0.0)[..., None] * part.out.abs()
        for part in parts
    )
    expected = 2.0**-8 * torch.linalg.vector_norm(mass, dim=-1).numpy()
    np.testing.assert_allclose(rows.part_rounding, expected, rtol=1e-12)
    result = with_parts(merged)
    loose = share_by_tensor(merged, side_of(merged.inputs, result))
    strict = share_by_tensor(
        merged, side_of(merged.inputs, dataclasses.replace(result, parts="float32"))
    )
    assert loose["out"] < strict["out"]
    assert loose["lse"] == strict["lse"]


def test_exact_data_must_be_bit_equal(exact: Evidence):
    result = right(exact)
    bits = result.out.view(np.uint16).copy()
    place = tuple(np.argwhere(np.abs(result.out.astype(np.float32)) > 0.5)[17])
    bits[place] += 1
    verdict = judged(exact, right(exact, out=bits.view(ml_dtypes.bfloat16)))
    assert verdict.status is Status.NUMERIC
    assert "allowed is none (exact data)" in verdict.reason
    assert verdict.worst[0].index == tuple(map(int, place))


def test_exact_lse_is_within_a_few_ulp(exact: Evidence):
    ulps = contract_of(exact.inputs).exact_lse_ulps
    assert ulps == (6.0 if exact.inputs.shards else 4.0)
    lse = right(exact).lse
    step = np.spacing(lse[1, 1])
    fine = judged(exact, right(exact, lse=changed(lse, (1, 1), lse[1, 1] + (ulps - 1) * step)))
    assert fine.status is Status.PASS
    off = judged(exact, right(exact, lse=changed(lse, (1, 1), lse[1, 1] + (ulps + 2) * step)))
    assert off.status is Status.NUMERIC


def test_exact_data_at_a_tie_may_round_either_way_and_nothing_else_may():
    evidence = evidence_of(inputs_of("dcp-decode:lens=5000,q=1,h=4,world=1,data=exact,seed=3"))
    whole = evidence.oracle(np.arange(1)).out
    spacing = np.spacing(np.abs(bfloat16(whole)).astype(np.float32)) * 2.0**16
    tie = np.abs(np.abs(whole - bfloat16(whole).astype(np.float64)) * 2 - spacing) == 0.0
    assert tie.any()
    result = right(evidence)
    low = bfloat16(whole - np.where(tie, 2.0**-20, 0.0))
    high = bfloat16(whole + np.where(tie, 2.0**-20, 0.0))
    assert not (low.view(np.uint16) == high.view(np.uint16)).all()
    for out in (low, high):
        assert judged(evidence, dataclasses.replace(result, out=out)).status is Status.PASS
    beyond = bfloat16(whole + 2 * spacing * tie)
    assert judged(evidence, dataclasses.replace(result, out=beyond)).status is Status.NUMERIC


@pytest.mark.parametrize(
    ("case", "parts", "whose", "out"),
    [
        (RAGGED, "float32", "FlashMLA's tests", decode_tolerance.FLASHMLA_DENSE),
        (RAGGED, "bfloat16", "FlashInfer's tests", decode_tolerance.FLASHINFER),
        (RAGGED + ",kv=e4m3", "bfloat16", "FlashInfer's tests", decode_tolerance.FLASHINFER_FLOAT8),
        (MERGED, "float32", "FlashInfer's DCP tests", decode_tolerance.MERGED),
        (MERGED + ",kv=e4m3", "float32", "FlashInfer's DCP tests", decode_tolerance.MERGED_FLOAT8),
    ],
)
def test_the_flashmla_profile_takes_the_row_of_the_surface(case, parts, whose, out):
    inputs = inputs_of(case)
    result = DcpDecodeResult(out=np.zeros(0), lse=np.zeros(0), parts=parts)
    contract = contract_of(inputs, result)
    assert (contract.whose, contract.tolerances) == (whose, out)


def test_a_reference_with_rounded_parts_brings_flashinfers_rule(ragged: Evidence):
    result = right(ragged)
    out = result.out.astype(np.float32)
    beyond = bfloat16((out + 4e-3 * (np.abs(out) > 0.5)).astype(np.float64))
    options = {"profile": "flashmla", "reference": right(ragged, parts="bfloat16")}
    verdict = judged(ragged, right(ragged, out=beyond), **options)
    assert verdict.status is Status.NUMERIC
    assert "FlashInfer's tests allow abs 0.001 and rel 0.001 together" in verdict.reason


def test_a_note_says_whose_data_the_tolerances_are_for(ragged: Evidence):
    assert [n for n in judged(ragged, right(ragged), profile="both").notes if "a tenth" in n]
    assert not [n for n in judged(ragged, right(ragged)).notes if "a tenth" in n]


def test_of_a_big_batch_256_tokens_and_the_most_different_are_judged(monkeypatch):
    from compare.judging import evidence as module

    monkeypatch.setattr(module, "EVERY_ROW_FLOP", 1.0)
    monkeypatch.setattr(module, "SAMPLED_TOKENS", 8)
    evidence = evidence_of(inputs_of("dcp-decode:lens=40+30,q=30+20,h=2,page=16,seed=5"))
    assert len(evidence.sample) == 8
    token = next(t for t in range(50) if t not in evidence.sample)
    result = right(evidence)
    out = changed(result.out, (token, 0), result.out[token - 1, 1])
    verdict = judged(evidence, right(evidence, out=out), reference=result)
    assert verdict.status is Status.NUMERIC
    assert verdict.worst[0].index[0] == token
    assert verdict.rows_judged < verdict.rows_total == 100


@pytest.mark.parametrize("words", ["lens=none,q=none", "lens=9,q=0", "lens=9,q=0,world=2,rank=all"])
def test_without_a_row_nothing_is_compared_and_the_run_is_not_green(words: str):
    inputs = inputs_of(f"dcp-decode:{words}")
    right = DcpDecodeResult(
        out=np.zeros((0, 16, 512), ml_dtypes.bfloat16), lse=np.zeros((0, 16), np.float32)
    )
    verdict = judge(inputs, right)
    assert verdict.status is Status.UNSUPPORTED
    assert "there was nothing to compare" in verdict.reason
    shorter = dataclasses.replace(right, lse=np.zeros((0, 1), np.float32))
    assert judge(inputs, shorter).status is Status.SHAPE
    report = compare.check("torch", "dcp-decode", "oracle", [f"dcp-decode:{words}"])
    assert (report.compared, report.exit_status) == (0, 3)
