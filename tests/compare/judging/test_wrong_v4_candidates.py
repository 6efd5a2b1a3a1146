"""Each wrong V4 prefill fails and is named by its own diagnosis, no other: by its tensors alone and
by its first wrong stage; the right ones pass.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path

import pytest

from compare.judging.evidence import Evidence
from compare.protocol.verdict import Status, Verdict
from compare.suites.table import make_inputs, parse_case
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.judge import evidence_of, judge
from compare.user.implementation import UserImplementation

CANDIDATES = Path(__file__).parents[2] / "candidates_v4"

# Every case shows every fault: requests that share a chunk, lists longer and shorter than topk, a
# window's edge, a request of one token, which no misread page makes NaN, one with few entries
# behind one whose rows are full, a full last row, an image. No golden has these head counts.
CASES = (
    "v4-prefill:seq=300+70+233+5+1+250,q=4+3+5+2+1+5,h=3,start=7,topk=33,sink=3.0,data=flat,"
    "poison=0,page=32,images=0:297-299,max_image=4,seed=8202",
    "v4-prefill:seq=61+233+3+1+90+100,q=4+6+2+1+3+6,h=3,ratio=2,topk=30,window=16,sink=mixed,"
    "poison=0,images=0:58-60,max_image=4,seed=8203",
)
POISONED = (
    "v4-prefill:seq=300+70+233+5+1+250,q=4+3+5+2+1+5,h=3,topk=20,sink=mixed,images=0:297-299,"
    "max_image=4,seed=8201"
)
ZERO_QUERIES = "v4-prefill:seq=300+70+2000+233,q=4+3+0+5,h=3,topk=20,sink=mixed,seed=8205"

GATHER = {
    "gather_off_by_one": "gather-off-by-one",
    "neighbour_request": "neighbour-request",
    "page_not_split": "page-not-split",
    "page_stride_unpadded": "page-stride-unpadded",
    "prefix_for_seq_len": "prefix-for-seq-len",
    "scale_groups_of_128": "scale-groups-of-128",
    "scales_ignored": "scales-ignored",
    "scales_of_neighbour_token": "scales-of-neighbour-token",
}
INDICES = {
    "compressed_left_out": "compressed-left-out",
    "entries_of_neighbour_request": "entries-of-neighbour-request",
    "entry_seen_late": "entry-seen-late",
    "image_ignored": "image-ignored",
    "length_off_by_one": "length-off-by-one",
    "request_base_doubled": "request-base-doubled",
    "request_base_missing": "request-base-missing",
    "sees_the_next_position": "sees-the-next-position",
    "topk_length_ignored": "topk-length-ignored",
    "window_left_out": "window-left-out",
    "window_offset_missing": "window-offset-missing",
    "window_too_long": "window-too-long",
    "window_too_short": "window-too-short",
}
ATTENTION = {
    "lse_base_2": "lse-base-2",
    "minus_one_wraps": "minus-one-wraps",
    "sink_omitted": "sink-omitted",
}
PLAN = {"empty_chunk_planned": "empty-chunk", "workspace_too_narrow": "workspace-size"}
STAGES = {"gather": GATHER, "indices": INDICES, "attention": ATTENTION}
WRONG = {**GATHER, **INDICES, **ATTENTION}
RIGHT = ("right_v4", "right_other_plan", "right_without_workspace")

# With poison outside every length all that these read is NaN, or may be: no value is left to tell
# one from another, and the stage alone does.
NAN_ALONE = ("neighbour_request", "page_not_split", "page_stride_unpadded", "prefix_for_seq_len")
READS_OUTSIDE = (*NAN_ALONE, "gather_off_by_one", "sees_the_next_position")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_is_named_by_its_tensors_alone(name: str, case: str):
    verdict = verdict_of(name, case, stages=False)
    assert verdict.status.failed
    assert [found.name for found in verdict.diagnosis] == [WRONG[name]], verdict.reason
    assert verdict.not_compared == ("plan", "stages")


@pytest.mark.parametrize("case", [*CASES, POISONED])
@pytest.mark.parametrize(
    ("stage", "name"), [(stage, name) for stage, names in STAGES.items() for name in names]
)
def test_a_wrong_candidate_is_named_by_its_first_wrong_stage(stage: str, name: str, case: str):
    verdict = verdict_of(name, case, stages=True)
    assert verdict.status.failed
    assert [found.name for found in verdict.diagnosis] == [WRONG[name]], verdict.reason
    assert verdict.diagnosis[0].sentence.startswith(f"{stage}: ")
    assert not verdict.not_compared


@pytest.mark.parametrize("name", [*READS_OUTSIDE, "window_left_out", "minus_one_wraps"])
def test_poison_outside_the_lengths_is_special_or_its_reader_is_named(name: str):
    verdict = verdict_of(name, POISONED, stages=False)
    names = [found.name for found in verdict.diagnosis]
    assert names == (["nan-where-finite"] if name in NAN_ALONE else [WRONG[name]]), verdict.reason
    if name in READS_OUTSIDE:
        assert verdict.status is Status.SPECIAL
        assert "is nan; a finite value is due" in verdict.reason


@pytest.mark.parametrize("name", PLAN)
def test_a_wrong_plan_is_named_though_its_tensors_are_right(name: str):
    verdict = verdict_of(name, ZERO_QUERIES, stages=True)
    assert verdict.status is Status.PLAN
    assert [found.name for found in verdict.diagnosis] == [PLAN[name]], verdict.reason
    assert verdict.diagnosis[0].sentence.startswith("plan: P")
    assert verdict_of(name, ZERO_QUERIES, stages=False).status is Status.PASS


@pytest.mark.parametrize("stages", [True, False])
@pytest.mark.parametrize("case", [*CASES, POISONED, ZERO_QUERIES])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_candidate_of_another_order_and_plan_passes(name: str, case: str, stages: bool):
    verdict = verdict_of(name, case, stages=stages)
    assert verdict.status is Status.PASS, verdict.reason
    assert verdict.diagnosis == ()
    assert verdict.share is not None
    assert 0.0 < verdict.share <= 1.0


def test_the_right_candidate_has_another_plan_and_says_that_its_order_is_another():
    ours, theirs = (result_of(name, ZERO_QUERIES).plan for name in ("right_v4", "right_other_plan"))
    assert ours is not None and theirs is not None
    assert (len(ours), len(theirs)) == (1, 2)
    notes = verdict_of("right_other_plan", ZERO_QUERIES, stages=True).notes
    assert notes[-1].startswith("indices: the same keys in another order than the engine's, in 12 ")


def test_a_candidates_file_is_run_as_any_other():
    from compare.run.api import check

    case = "v4-prefill:seq=20+9,q=2+1,h=2,topk=4,window=8,seed=8207"
    for name, names in (("right_v4", []), ("window_too_short", ["window-too-short"])):
        target = f"{CANDIDATES / name}.py:v4_prefill"
        (row,) = check(target, "v4-prefill", reference="oracle", cases=[case]).rows
        assert [found.name for found in row.verdict.diagnosis] == names, row.verdict.reason


def test_no_golden_holds_these_cases():
    recorded = (CANDIDATES.parents[1] / "goldens").glob("*/*/manifest.json")
    held = "".join(manifest.read_text() for manifest in recorded)
    cases = (*CASES, POISONED, ZERO_QUERIES)
    assert not [case for case in cases if str(parse_case(case)) in held]


def documented_sizes() -> list[list[str]]:
    """The table of docs/tolerances.md: candidate, case, stage, and errors of out and lse."""
    text = (CANDIDATES.parents[1] / "docs" / "tolerances.md").read_text()
    table = text.split("| candidate | case | first wrong stage | out | lse |")[1].split("\n\n")[0]
    lines = table.strip().split("\n")[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("line", documented_sizes(), ids=lambda line: line[0])
def test_the_documented_size_and_stage_of_a_fault_are_the_measured_ones(line: list[str]):
    name, case, stage, *sizes = line
    verdict = verdict_of(name, f"v4-prefill:{case}", stages=True)
    assert [found.name for found in verdict.diagnosis] == [WRONG[name]]
    assert verdict.diagnosis[0].sentence.startswith(f"{stage}: ")
    # Torch may add in another order elsewhere: two digits hold.
    for size, tensor in zip(sizes, ("out", "lse"), strict=True):
        measured = verdict.against_oracle[tensor].max_abs
        assert measured == pytest.approx(float(size), rel=1e-2)


def test_every_wrong_candidate_has_its_file():
    files = {path.stem for path in CANDIDATES.glob("*.py")}
    assert files == {*WRONG, *PLAN, *RIGHT}


def verdict_of(name: str, case: str, *, stages: bool) -> Verdict:
    result = result_of(name, case)
    if not stages:
        result = dataclasses.replace(result, plan=None, stages=None)
    evidence = evidence_for(case)
    return judge(evidence.inputs, result, evidence=evidence)


@functools.cache
def evidence_for(case: str) -> Evidence:
    inputs = make_inputs(parse_case(case))
    assert isinstance(inputs, V4PrefillInputs)
    return evidence_of(inputs)


@functools.cache
def result_of(name: str, case: str) -> V4PrefillResult:
    function = _module(name).v4_prefill
    result = UserImplementation(function, device="cpu").run(evidence_for(case).inputs)
    assert isinstance(result, V4PrefillResult)
    return result


def _module(name: str):
    """A candidate's file with its folder on sys.path, as FILE.py:FUNCTION has it."""
    spec = importlib.util.spec_from_file_location(f"v4_{name}", CANDIDATES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(CANDIDATES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(CANDIDATES))
    return module
