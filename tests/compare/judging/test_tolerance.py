"""The calibrated bounds: each term is needed by some right kernel, and none hides a small fault."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from compare.calibrate.calibrate import calibrate, calibration_of, table
from compare.judging import tolerance
from compare.judging.attention import evidence_of, judge
from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.model_kernels import Freedom, run
from compare.protocol.verdict import Status
from compare.suites.table import SUITES

CALIBRATION = calibration_of(SUITES["sparse-prefill"])
ROOT = Path(__file__).parents[3]
RIGHT = 1 + len(CALIBRATION.models)
"""Kernels that must raise no alarm: xla and the models."""
BFLOAT16 = ml_dtypes.bfloat16


def drawn(rng, *, tokens, heads, d, keys, form=np.asarray) -> SparsePrefillInputs:
    """N(0, 1) inputs of which every token sees every key, in its own order."""
    return SparsePrefillInputs(
        q=form(rng.standard_normal((tokens, heads, d))).astype(BFLOAT16),
        kv=form(rng.standard_normal((keys, d))).astype(BFLOAT16),
        indices=np.stack([rng.permutation(keys) for _ in range(tokens)]).astype(np.int32),
        sm_scale=d**-0.5,
    )


def test_truncated_sums_of_one_sign_need_the_drift(monkeypatch):
    rng = np.random.default_rng(0)
    inputs = drawn(rng, tokens=4, heads=16, d=576, keys=64, form=np.abs)
    result = run(inputs, Freedom(truncates=True), rng)
    assert judge(inputs, result).status is Status.PASS
    monkeypatch.setattr(tolerance, "MMA_COLUMNS", np.inf)
    without = judge(inputs, result)
    assert without.shares["max_logits"] > 1.0
    assert without.shares["lse"] > 1.0


def test_copies_of_few_keys_need_their_number_in_the_bound():
    rng = np.random.default_rng(0)
    with_copies, without = 0.0, 0.0
    for ones in [1, 64] * 60:
        inputs = drawn(rng, tokens=2, heads=8, d=512, keys=2)
        slots = np.repeat(np.array([0, 1], np.int32), [ones, 64])
        inputs = dataclasses.replace(inputs, indices=np.tile(rng.permutation(slots), (2, 1)))
        result = run(inputs, Freedom(block=1, order="shuffled", lazy=8.0), rng)
        evidence = evidence_of(inputs)
        with_copies = max(with_copies, judge(inputs, result, evidence=evidence).shares["out"])
        (rows,) = evidence.blocks(evidence.sample)
        error = np.linalg.norm(result.out.astype(np.float64) - rows.oracle.out, axis=-1)
        plain = 2 * rows.torch_error + 2.0**-8 * rows.oracle.p2
        without = max(without, float((error / plain).max()))
    assert with_copies < 1.0 < without


def test_nearly_equal_scores_in_the_thousands_need_their_rounding_in_the_bound():
    rng = np.random.default_rng(0)
    with_scores, without = 0.0, 0.0
    for number in range(40):
        inputs = drawn(rng, tokens=4, heads=16, d=576, keys=2 + number % 3)
        kv = inputs.kv.astype(np.float64)
        kv[1:] = kv[0] + kv[1:] / 1000
        q = inputs.q.astype(np.float64) * 1000
        inputs = dataclasses.replace(inputs, q=q.astype(BFLOAT16), kv=kv.astype(BFLOAT16))
        result = run(inputs, Freedom(block=1, order="shuffled", lazy=8.0), rng)
        evidence = evidence_of(inputs)
        with_scores = max(with_scores, judge(inputs, result, evidence=evidence).shares["out"])
        (rows,) = evidence.blocks(evidence.sample)
        error = np.linalg.norm(result.out.astype(np.float64) - rows.oracle.out, axis=-1)
        plain = 2 * rows.torch_error + 2.0**-8 * rows.oracle.p2
        without = max(without, float((error / plain).max()))
    assert with_scores < 1.0 < without


def test_a_flushed_reciprocal_may_give_zero_and_a_smaller_sink_may_not():
    rng = np.random.default_rng(0)
    inputs = drawn(rng, tokens=2, heads=2, d=512, keys=8)
    for sink, status in ((100.0, Status.PASS), (80.0, Status.NUMERIC)):
        sunk = dataclasses.replace(inputs, attn_sink=np.full(2, sink, np.float32))
        result = run(sunk, Freedom(), rng)
        zero = dataclasses.replace(result, out=np.zeros_like(result.out))
        assert judge(sunk, zero).status is status


@pytest.mark.parametrize("foreign", [False, True])
def test_one_dropped_or_foreign_key_among_two_thousand_shows_on_flat_data(inputs_of, foreign):
    inputs = inputs_of("s_q=1,s_kv=3000,h=4,topk=2048,data=flat,poison=0,seed=8")
    indices = inputs.indices.copy()
    indices[0, 1234] = np.setdiff1d(np.arange(3000), indices)[0] if foreign else -1
    rng = np.random.default_rng(0)
    assert judge(inputs, run(inputs, Freedom(), rng)).status is Status.PASS
    wrong = judge(inputs, run(dataclasses.replace(inputs, indices=indices), Freedom(), rng))
    assert wrong.status is Status.NUMERIC
    assert wrong.shares["out"] > 2.0


def test_a_reference_that_moves_needs_more_than_twice_the_yardsticks_error(inputs_of):
    """Why |t - o| alone is no bound: the yardstick rounds its largest P to exactly 1."""
    largest = 0.0
    for seed in range(20):
        inputs = inputs_of(f"s_q=2,s_kv=64,h=16,topk=64,data=peaked,seed={seed}")
        rng = np.random.default_rng(seed)
        result = run(inputs, Freedom(block=1, order="shuffled", lazy=8.0), rng)
        evidence = evidence_of(inputs)
        verdict = judge(inputs, result, evidence=evidence)
        assert verdict.status is Status.PASS
        (rows,) = evidence.blocks(evidence.sample)
        error = np.linalg.norm(result.out.astype(np.float64) - rows.oracle.out, axis=-1)
        largest = max(largest, float((error / (2 * rows.torch_error)).max()))
    assert largest > 1.0


def test_right_kernels_raise_no_alarm_and_faults_do():
    measured = calibrate(SUITES["sparse-prefill"], 60, 4, 7, Console(file=io.StringIO()))
    assert [row["alarms"] for row in measured["right"].values()] == [[]] * (
        1 + len(CALIBRATION.models)
    )
    assert measured["right"]["xla"]["cases"] == 60
    assert measured["distinct_shapes"] <= 4
    faults = measured["faults"].values()
    assert sum(row["caught"] for row in faults) > 0.8 * sum(row["cases"] for row in faults) > 0
    assert json.loads(json.dumps(measured)) == measured


def test_the_documented_table_is_the_recorded_measurement():
    (recorded,) = (ROOT / "measurements").glob("judge-calibration-*.json")
    measured = json.loads(recorded.read_text())
    text = (ROOT / "docs" / "tolerances.md").read_text()
    assert table(measured, CALIBRATION.statistics) in text
    assert recorded.name in text
    assert measured["cases"] >= 10_000
    assert measured["distinct_shapes"] <= 200
    assert [row["alarms"] for row in measured["right"].values()] == [[]] * (
        1 + len(CALIBRATION.models)
    )
