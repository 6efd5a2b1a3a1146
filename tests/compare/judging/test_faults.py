"""Every entry of a suite's table of faults can be planted, and the judge catches it."""

from __future__ import annotations

import importlib
import io
import json

import pytest
from rich.console import Console

from compare.calibrate.__main__ import main
from compare.calibrate.calibrate import calibrate, calibration_of
from compare.judging.calibration import planted
from compare.judging.sides import share_by_tensor
from compare.suites.table import SUITES, make_inputs, parse_case

# Together the cases of a suite show every fault of its table.
CASES = {
    "sparse-prefill": (
        "s_q=6,s_kv=300,h=12,d=576,topk=160,sink=mixed,length=ragged,invalid=0.2,empty_rows=1,"
        "seed=7101",
    ),
    "dcp-decode": (
        "lens=71+43+3,q=7+1+1,h=5,page=16,world=2,rank=1,interleave=4,kv=e4m3,q_dtype=e4m3,"
        "seed=8108",
        "lens=61+43+3,q=5+2+2,h=5,page=16,world=2,rank=all,interleave=4,kv=e4m3,seed=8104",
    ),
    "v4-prefill": (
        "seq=61+233+3+1+90+100,q=4+6+2+1+3+6,h=3,ratio=2,topk=30,window=16,sink=mixed,poison=0,"
        "images=0:58-60,max_image=4,seed=8203",
    ),
}


def table_of(suite: str):
    module = SUITES[suite].faults
    assert module is not None
    return importlib.import_module(module)


@pytest.mark.parametrize("suite", CASES)
def test_every_fault_can_be_planted_and_is_caught(suite: str):
    judge = importlib.import_module(SUITES[suite].judging)
    calibration = calibration_of(SUITES[suite])
    caught = set()
    for words in CASES[suite]:
        inputs = make_inputs(parse_case(f"{suite}:{words}"))
        evidence = judge.evidence_of(inputs)
        for fault in calibration.faults(evidence):
            result = planted(calibration, evidence, fault)
            if result is not None:
                shares = share_by_tensor(evidence, judge.side_of(inputs, result))
                assert max(shares.values()) > 1.0, fault.label
                caught.add(fault.label)
    assert {fault.label for fault in table_of(suite).FAULTS} - caught == set()


@pytest.mark.parametrize("suite", CASES)
def test_entries_of_one_name_are_told_apart(suite: str):
    labels = [fault.label for fault in table_of(suite).FAULTS]
    assert len(set(labels)) == len(labels)


def test_right_v4_kernels_raise_no_alarm_and_faults_do():
    measured = calibrate(SUITES["v4-prefill"], 8, 1, 7, Console(file=io.StringIO()))
    assert [row["alarms"] for row in measured["right"].values()] == [[]] * len(measured["right"])
    assert measured["right"]["xla"]["cases"] == 8
    faults = measured["faults"].values()
    assert sum(row["caught"] for row in faults) > 0.8 * sum(row["cases"] for row in faults) > 0
    assert json.loads(json.dumps(measured)) == measured


def test_a_suite_without_bounds_is_refused_with_those_that_have_some(capsys):
    with pytest.raises(SystemExit):
        main(["prefill-plan"])
    assert "dcp-decode" in capsys.readouterr().err
    with pytest.raises(ValueError, match="prefill-plan has no bounds"):
        calibration_of(SUITES["prefill-plan"])
