"""Each wrong decode fails and is named by its own diagnosis, no other; the right ones pass."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from compare.houses.ranks import run_shards
from compare.judging.evidence import Evidence
from compare.protocol.verdict import Status, Verdict
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.judge import evidence_of, judge
from compare.suites.table import default_cases, make_inputs, parse_case

CANDIDATES = Path(__file__).parents[2] / "candidates_decode"

# Every case shows every fault that can be in it: lengths that differ and whose rows divide by the
# requests, a request that has no key on rank 1, float8 keys with a scale, and head counts and
# lengths that no golden has.
ONE_RANK = (
    "dcp-decode:lens=71+43+3,q=7+1+1,h=5,page=16,world=2,rank=1,interleave=4,kv=e4m3,pad_rows=3,"
    "stale=1,seed=8101",
    "dcp-decode:lens=301+97+2,q=8+3+1,h=12,page=32,world=4,rank=1,interleave=2,kv=e4m3,data=flat,"
    "seed=8102",
    "dcp-decode:lens=130+77+64+2,q=4+7+0+1,h=7,world=2,rank=1,interleave=2,kv=e4m3,data=peaked,"
    "seed=8103",
)
ALL_RANKS = (
    "dcp-decode:lens=61+43+3,q=5+2+2,h=5,page=16,world=2,rank=all,interleave=4,kv=e4m3,seed=8104",
    "dcp-decode:lens=301+97+2,q=8+3+1,h=6,page=32,world=4,rank=all,interleave=2,kv=e4m3,data=flat,"
    "pad_rows=3,seed=8105",
)
WRONG = {
    "all_rows_at_total": "all-rows-at-total",
    "viewed_as_uniform": "viewed-as-uniform",
    "localised_before_expanding": "localised-before-expanding",
    "bound_off_by_one": "bound-off-by-one",
    "interleave_ignored": "interleave-ignored",
    "neighbour_request": "neighbour-request",
    "scale_twice": "scale-twice",
    "wrong_value_columns": "wrong-value-columns",
    "heads_rotated": "heads-rotated",
    "lse_layout_reshaped": "lse-layout-reshaped",
    "empty_rank_lse_zero": "empty-rank-lse-zero",
    "kv_scale_ignored": "kv-scale-ignored",
    "kv_scale_on_keys_only": "kv-scale-on-keys-only",
    "kv_scale_on_values_only": "kv-scale-on-values-only",
}
WRONG_ON_ONE_RANK = {
    "lse_base_2": "lse-base-2",
    "empty_lse_plus_inf": "empty-lse-plus-inf",
    "wrong_rank_mask": "wrong-rank-mask",
}
WRONG_IN_A_MERGE = {
    "lse_base_2": "lse-base-2-in-merge",
    "lse_bases_mixed": "lse-bases-mixed",
}
PADDED_CASES = (
    "dcp-decode:lens=61+43+30,q=5+2+2,h=5,page=16,world=2,rank=1,interleave=4,pad_rows=3,seed=8106",
    "dcp-decode:lens=61+43+3,q=5+2+2,h=5,page=16,world=2,rank=all,pad_rows=2,seed=8107",
)
QUERY_CASES = (
    "dcp-decode:lens=71+43+3,q=7+1+1,h=5,page=16,world=2,rank=1,interleave=4,kv=e4m3,q_dtype=e4m3,"
    "seed=8108",
    "dcp-decode:lens=130+77,q=4+7,h=6,world=2,rank=all,kv=e4m3,q_dtype=e4m3,data=flat,seed=8109",
)
QUERIES = {"q_scale_ignored": "q-scale-ignored"}
PADDED = {"padded_rows_run": "padded-rows-not-empty"}
CORNER_CASES = 9


def _module(name: str):
    """A candidate's file with its folder on sys.path, as FILE.py:FUNCTION has it."""
    spec = importlib.util.spec_from_file_location(f"decode_{name}", CANDIDATES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(CANDIDATES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(CANDIDATES))
    return module


@pytest.fixture(scope="module", params=ONE_RANK)
def one_rank(request: pytest.FixtureRequest) -> Evidence:
    return evidence_of(inputs_of(request.param))


@pytest.fixture(scope="module", params=ALL_RANKS)
def all_ranks(request: pytest.FixtureRequest) -> Evidence:
    return evidence_of(inputs_of(request.param))


@pytest.mark.parametrize("name", [*WRONG, *WRONG_ON_ONE_RANK])
def test_a_wrong_candidate_of_one_rank_fails_under_its_own_name(name: str, one_rank: Evidence):
    check_named(verdict_of(name, one_rank), (WRONG | WRONG_ON_ONE_RANK)[name])


@pytest.mark.parametrize("name", [*WRONG, *WRONG_IN_A_MERGE])
def test_a_wrong_candidate_fails_under_its_own_name_when_merged(name: str, all_ranks: Evidence):
    check_named(verdict_of(name, all_ranks), (WRONG | WRONG_IN_A_MERGE)[name])


@pytest.mark.parametrize("case", PADDED_CASES)
def test_padded_rows_that_attend_are_named(case: str):
    verdict = verdict_of("padded_rows_run", evidence_of(inputs_of(case)))
    check_named(verdict, PADDED["padded_rows_run"])
    assert verdict.status is Status.SPECIAL


@pytest.mark.parametrize("case", QUERY_CASES)
def test_stored_queries_taken_as_they_are_are_named(case: str):
    evidence = evidence_of(inputs_of(case))
    check_named(verdict_of("q_scale_ignored", evidence), QUERIES["q_scale_ignored"])
    for right in ("right_decode", "right_splits"):
        check_right(verdict_of(right, evidence))
    check_named(verdict_of("kv_scale_ignored", evidence), "kv-scale-ignored")


def check_named(verdict: Verdict, name: str) -> None:
    assert verdict.status.failed
    assert [found.name for found in verdict.diagnosis] == [name], verdict.reason
    size = verdict.against_oracle["out"].max_abs
    assert f"off by up to {size:.3g} in out" in verdict.reason


@pytest.mark.parametrize("name", ["right_decode", "right_splits"])
def test_a_right_candidate_of_another_order_passes(name: str, one_rank: Evidence):
    check_right(verdict_of(name, one_rank))


@pytest.mark.parametrize("name", ["right_decode", "right_splits"])
def test_a_right_candidate_merged_over_ranks_passes(name: str, all_ranks: Evidence):
    check_right(verdict_of(name, all_ranks))


def check_right(verdict: Verdict) -> None:
    assert not verdict.status.failed, verdict.reason
    assert verdict.diagnosis == ()
    assert verdict.share is not None
    assert 0.0 < verdict.share <= 1.0


def test_flashmlas_empty_lse_merges_rightly_all_the_same(all_ranks: Evidence):
    check_right(verdict_of("empty_lse_plus_inf", all_ranks))


def test_no_golden_holds_these_cases():
    recorded = (CANDIDATES.parents[1] / "goldens").glob("*/*/manifest.json")
    held = "".join(manifest.read_text() for manifest in recorded)
    assert not [
        case
        for case in (*ONE_RANK, *ALL_RANKS, *PADDED_CASES, *QUERY_CASES)
        if str(parse_case(case)) in held
    ]


@pytest.fixture(scope="module")
def corner_evidence() -> list[Evidence]:
    """The default cases at whose corners nothing else is."""
    lines = [str(case) for case in default_cases("dcp-decode")]
    return [evidence_of(inputs_of(line)) for line in lines[-CORNER_CASES:]]


@pytest.mark.parametrize("fault", sorted(_module("wrong_in_corners").FAULTS))
def test_a_fault_in_a_corner_fails_in_a_default_case(fault: str, corner_evidence: list[Evidence]):
    def wrong(**call: Any) -> Any:
        return _module("wrong_in_corners").wrong(fault, **call)

    verdicts = (
        judge(evidence.inputs, answer_of(wrong, evidence.inputs), evidence=evidence)
        for evidence in corner_evidence
    )
    assert any(verdict.status.failed for verdict in verdicts)


def test_a_right_candidate_passes_in_corners(corner_evidence: list[Evidence]):
    for evidence in corner_evidence:
        check_right(verdict_of("right_decode", evidence))


def documented_sizes() -> list[list[str]]:
    """The table of docs/tolerances.md: candidate, case, name, and errors of out and lse."""
    text = (CANDIDATES.parents[1] / "docs" / "tolerances.md").read_text()
    table = text.split("| candidate | case | named | out | lse |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[2:]]


@pytest.mark.parametrize("line", documented_sizes(), ids=lambda line: f"{line[0]}-{line[1]}")
def test_the_documented_size_of_a_fault_is_the_measured_one(line: list[str]):
    name, case, named, *sizes = line
    verdict = verdict_of(name, evidence_of(inputs_of(f"dcp-decode:{case}")))
    check_named(verdict, named)
    metrics = verdict.against_oracle
    # Torch may add in another order elsewhere: two digits hold.
    for size, tensor in zip(sizes, ("out", "lse"), strict=True):
        assert metrics[tensor].max_abs == pytest.approx(float(size), rel=1e-2)


def test_every_wrong_candidate_has_its_file():
    files = {path.stem for path in CANDIDATES.glob("*.py")}
    wrong = {*WRONG, *WRONG_ON_ONE_RANK, *WRONG_IN_A_MERGE, *PADDED, *QUERIES}
    assert files == {*wrong, "right_decode", "right_splits", "wrong_in_corners"}


def inputs_of(case: str) -> DcpDecodeInputs:
    inputs = make_inputs(parse_case(case))
    assert isinstance(inputs, DcpDecodeInputs)
    return inputs


def verdict_of(name: str, evidence: Evidence) -> Verdict:
    return judge(evidence.inputs, result_of(name, evidence.inputs), evidence=evidence)


def result_of(name: str, inputs: DcpDecodeInputs) -> DcpDecodeResult:
    return answer_of(_module(name).dcp_decode, inputs)


def answer_of(function: Callable[..., Any], inputs: DcpDecodeInputs) -> DcpDecodeResult:
    def call(one: DcpDecodeInputs) -> DcpDecodeResult:
        out, lse = function(**_arguments(one))
        out = out.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return DcpDecodeResult(out=out, lse=lse.numpy(), parts="bfloat16")

    return run_shards(call, inputs) if inputs.shards else call(inputs)


def _arguments(inputs: DcpDecodeInputs) -> dict[str, Any]:
    """What a candidate of one's own gets: arrays as torch tensors, the rest as it is."""
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    for name in ("case", "shards", "max_query_len"):
        del fields[name]
    return {
        name: _tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)
