"""`run --candidate FILE.py:FUNCTION` on each wrong candidate: exit status 1 and its own diagnosis.

The functions run in this process: a worker process each would import torch twelve times. What a
worker adds is tested in tests/compare/run and, through the command line, in test_end_to_end.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from compare.goldens import files
from compare.run import registry
from tests.compare.cli.command_line import command_line

FOLDER = Path(__file__).parents[2] / "candidates"
# Each shows every fault: a sink of the size of the lse, ragged lengths with valid indices after
# them, -1 among the holes, an empty row, and D = 576.
CASES = (
    "sparse-prefill:s_q=4,s_kv=210,h=7,d=576,topk=100,sink=mixed,length=ragged,invalid=0.2,"
    "empty_rows=1,seed=8101",
    "sparse-prefill:s_q=6,s_kv=80,h=20,d=576,topk=70,data=flashmla,sink=2.5,length=ragged,"
    "invalid=0.3,order=dup,empty_rows=1,seed=8102",
    "sparse-prefill:s_q=5,s_kv=400,h=5,d=576,topk=200,data=flat,sink=4.5,length=ragged,"
    "invalid=0.1,order=sorted,empty_rows=1,seed=8103",
)
DIAGNOSES = {
    "empty_lse_minus_inf": "empty-lse-minus-inf",
    "heads_rotated": "heads-rotated",
    "length_ignored": "length-ignored",
    "length_off_by_one": "length-off-by-one",
    "lse_base_2": "lse-base-2",
    "max_before_scaling": "max-before-scaling",
    "minus_one_wraps": "minus-one-wraps",
    "scale_twice": "scale-twice",
    "sink_in_lse": "sink-in-lse",
    "sink_omitted": "sink-omitted",
    "sink_times_sm_scale": "sink-times-sm-scale",
    "wrong_value_columns": "wrong-value-columns",
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(registry, "find", registry.in_process)


def test_every_wrong_candidate_is_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *DIAGNOSES,
        "right_attention",
        "right_other_order",
    }


def test_no_golden_holds_these_cases():
    recorded = {case for name in files.available() for case in files.golden_cases(name)}
    assert not recorded & set(CASES)


@pytest.mark.parametrize("name", DIAGNOSES)
def test_a_wrong_candidate_exits_1_and_is_named_by_its_own_diagnosis(name):
    candidate = f"{FOLDER / name}.py:sparse_prefill"
    found = command_line("run", *CASES, "--candidate", candidate)
    assert found.status == 1
    diagnosed = [line.split()[1] for line in found.out.splitlines() if "  diagnosis " in line]
    assert [word.rstrip(":") for word in diagnosed] == [DIAGNOSES[name]] * len(CASES)
    for case in CASES:
        assert any(line.endswith(f" {candidate} {case}") for line in found.out.splitlines())
        assert f"run {case} --candidate {candidate} --reference oracle" in found.out


def test_a_right_candidate_of_another_order_exits_0():
    candidate = f"{FOLDER / 'right_other_order'}.py:sparse_prefill"
    found = command_line("run", *CASES, "--candidate", candidate, "--require", "3")
    assert found.status == 0, found.out
    assert "diagnosis" not in found.out
