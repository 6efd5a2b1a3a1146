"""Each wrong candidate fails and is named by its own diagnosis, no other; the right one passes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from compare.judging.attention import evidence_of, judge
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.evidence import Evidence
from compare.protocol.verdict import Verdict
from compare.suites.table import make_inputs, parse_case

CANDIDATES = Path(__file__).parents[2] / "candidates"

# Head counts that no golden has; every case shows every fault: a sink of the size of the lse,
# ragged lengths with valid indices after them, -1 among the holes, an empty row, and D = 576.
CASES = (
    "sparse-prefill:s_q=6,s_kv=300,h=12,d=576,topk=160,sink=mixed,length=ragged,invalid=0.2,"
    "empty_rows=1,seed=7101",
    "sparse-prefill:s_q=9,s_kv=90,h=24,d=576,topk=77,data=flashmla,sink=2.5,length=ragged,"
    "invalid=0.3,order=dup,empty_rows=2,seed=7102",
    "sparse-prefill:s_q=5,s_kv=700,h=5,d=576,topk=333,data=flat,sink=5.0,length=ragged,"
    "invalid=0.1,order=sorted,empty_rows=1,strided=1,seed=7103",
    "sparse-prefill:s_q=7,s_kv=150,h=10,d=576,topk=96,sm_scale=0.02,data=peaked,sink=mixed,"
    "length=ragged,invalid=0.25,empty_rows=1,seed=7104",
)
WRONG = {
    "lse_base_2": "lse-base-2",
    "sink_omitted": "sink-omitted",
    "sink_in_lse": "sink-in-lse",
    "sink_times_sm_scale": "sink-times-sm-scale",
    "minus_one_wraps": "minus-one-wraps",
    "length_ignored": "length-ignored",
    "length_off_by_one": "length-off-by-one",
    "scale_twice": "scale-twice",
    "max_before_scaling": "max-before-scaling",
    "heads_rotated": "heads-rotated",
    "wrong_value_columns": "wrong-value-columns",
    "empty_lse_minus_inf": "empty-lse-minus-inf",
}


@pytest.fixture(scope="module", params=CASES)
def evidence(request: pytest.FixtureRequest) -> Evidence:
    inputs = make_inputs(parse_case(request.param))
    assert isinstance(inputs, SparsePrefillInputs)
    return evidence_of(inputs)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_fails_and_is_named_by_its_own_fault(name: str, evidence: Evidence):
    verdict = verdict_of(name, evidence)
    assert verdict.status.failed
    assert [found.name for found in verdict.diagnosis] == [WRONG[name]], verdict.reason


@pytest.mark.parametrize("name", ["right_other_order", "right_attention"])
def test_a_right_candidate_of_another_order_passes(name: str, evidence: Evidence):
    verdict = verdict_of(name, evidence)
    assert not verdict.status.failed, verdict.reason
    assert verdict.diagnosis == ()
    assert verdict.share is not None
    assert 0.0 < verdict.share <= 1.0


def test_no_golden_holds_these_cases():
    recorded = (CANDIDATES.parents[1] / "goldens").glob("*/*/manifest.json")
    held = "".join(manifest.read_text() for manifest in recorded)
    assert "sparse-prefill:" in held
    assert not [case for case in CASES if str(parse_case(case)) in held]


def test_every_wrong_candidate_has_its_file():
    files = {path.stem for path in CANDIDATES.glob("*.py")}
    assert files == {*WRONG, "right_attention", "right_other_order"}


def verdict_of(name: str, evidence: Evidence) -> Verdict:
    return judge(evidence.inputs, result_of(name, evidence.inputs), evidence=evidence)


def result_of(name: str, inputs: SparsePrefillInputs) -> SparsePrefillResult:
    module = _module(name)
    function = module.attend if name == "right_attention" else module.sparse_prefill
    sink, length = inputs.attn_sink, inputs.topk_length
    out, max_logits, lse = function(
        q=_bfloat16(inputs.q),
        kv=_bfloat16(inputs.kv),
        indices=torch.from_numpy(inputs.indices),
        sm_scale=inputs.sm_scale,
        d_v=inputs.d_v,
        attn_sink=None if sink is None else torch.from_numpy(sink),
        topk_length=None if length is None else torch.from_numpy(length),
    )
    return SparsePrefillResult(
        out=out.view(torch.int16).numpy().view(ml_dtypes.bfloat16),
        max_logits=max_logits.numpy(),
        lse=lse.numpy(),
    )


def _bfloat16(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _module(name: str):
    """A candidate's file with its folder on sys.path, as FILE.py:FUNCTION has it."""
    spec = importlib.util.spec_from_file_location(f"candidate_{name}", CANDIDATES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(CANDIDATES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(CANDIDATES))
    return module
