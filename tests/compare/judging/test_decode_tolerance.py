"""How much room the bounds of decode leave right kernels, and how little faults."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from compare.calibrate.calibrate import calibrate, table
from compare.judging.model_kernels import Freedom
from compare.protocol.verdict import Status
from compare.suites.dcp_decode.calibration import CALIBRATION, Splitting, run
from compare.suites.dcp_decode.judge import evidence_of, judge
from compare.suites.dcp_decode.make import dcp_decode_inputs
from compare.suites.table import SUITES, parse_case

ROOT = Path(__file__).parents[3]
RIGHT = 1 + len(CALIBRATION.models)
"""Kernels that must raise no alarm: xla and the models."""


def inputs_of(words: str):
    return dcp_decode_inputs(parse_case(f"dcp-decode:{words}"))


def test_right_kernels_raise_no_alarm_and_faults_do():
    measured = calibrate(SUITES["dcp-decode"], 16, 1, 7, Console(file=io.StringIO()))
    assert [row["alarms"] for row in measured["right"].values()] == [[]] * (
        1 + len(CALIBRATION.models)
    )
    assert measured["right"]["xla"]["cases"] == 16
    assert measured["distinct_shapes"] == 1
    faults = measured["faults"].values()
    assert sum(row["caught"] for row in faults) > 0.8 * sum(row["cases"] for row in faults) > 0
    assert json.loads(json.dumps(measured)) == measured


def test_the_documented_table_is_the_recorded_measurement():
    (recorded,) = (ROOT / "measurements").glob("decode-judge-calibration-*.json")
    measured = json.loads(recorded.read_text())
    text = (ROOT / "docs" / "tolerances.md").read_text()
    assert table(measured, statistics=("lse",)) in text
    assert recorded.name in text
    assert measured["cases"] >= 1_000
    assert [row["alarms"] for row in measured["right"].values()] == [[]] * (
        1 + len(CALIBRATION.models)
    )


def test_ranges_that_a_kernel_rounds_and_merges_need_no_room_of_their_own():
    """Rounding them at random is inside of twice the yardstick's error and that of P."""
    inputs = inputs_of("lens=2000+700,q=2+8,h=8,data=flat")
    result = run(inputs, Splitting(freedom=Freedom(), split=64), np.random.default_rng(0))
    assert result.parts == "bfloat16"
    verdict = judge(inputs, result)
    assert verdict.status is Status.PASS
    assert 0.2 < verdict.shares["out"] < 0.6
    assert 0.2 < verdict.shares["out tensor"] < 0.8


def test_a_model_that_leaves_out_each_requests_last_key_fails():
    inputs = inputs_of("lens=301+97,q=4+2,h=4,world=2,rank=1,data=flat")
    evidence = evidence_of(inputs)
    right = run(inputs, Splitting(freedom=Freedom()), np.random.default_rng(0))
    assert judge(inputs, right, evidence=evidence).status is Status.PASS
    fewer = dataclasses.replace(inputs, seq_lens=inputs.seq_lens - 1)
    wrong = run(fewer, Splitting(freedom=Freedom()), np.random.default_rng(0))
    assert judge(inputs, wrong, evidence=evidence).status is Status.NUMERIC
