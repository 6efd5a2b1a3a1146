"""The plans recorded from vLLM itself, against both planners of this project."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import torch_ref.planning
from compare.goldens.files import available, golden_cases
from compare.goldens.format import read_manifest, write_manifest
from compare.goldens.implementation import GoldenImplementation
from compare.judging.plans import PlanChunk, PlanResult, PrefillPlanInputs
from compare.suites.table import SUITES, make_inputs, parse_case
from jax_impl.planning import plan_prefill_chunks

NAME = "engine/vllm-0.33.0"
CASES = golden_cases(NAME)


def recorded(line: str) -> tuple[PrefillPlanInputs, tuple[PlanChunk, ...]]:
    inputs = make_inputs(parse_case(line))
    assert isinstance(inputs, PrefillPlanInputs)
    plan = GoldenImplementation(NAME, SUITES).run(inputs)
    assert isinstance(plan, PlanResult)
    return inputs, plan.chunks


def arguments(inputs: PrefillPlanInputs) -> dict:
    names = {field.name for field in dataclasses.fields(inputs)} - {"case"}
    return {name: getattr(inputs, name) for name in names}


def chunks(plan) -> tuple[PlanChunk, ...]:
    names = [field.name for field in dataclasses.fields(PlanChunk)]
    return tuple(PlanChunk(**{name: getattr(chunk, name) for name in names}) for chunk in plan)


def test_two_hundred_distinct_batches_are_recorded():
    assert NAME in available()
    assert len(set(CASES)) == len(CASES) == 200
    assert all(str(parse_case(line)) == line for line in CASES)


def test_the_shipped_rules_give_each_recorded_plan():
    for line in CASES:
        inputs, expected = recorded(line)
        plan = torch_ref.planning.plan_prefill_chunks(**arguments(inputs), rules="vllm-0.33.0")
        assert chunks(plan) == expected, line


@pytest.mark.parametrize(
    "planner", [plan_prefill_chunks, torch_ref.planning.plan_prefill_chunks], ids=["jax", "torch"]
)
def test_the_fixed_rules_give_the_recorded_plan_where_no_query_is_empty(planner):
    without_empty = [line for line in CASES if 0 not in recorded(line)[0].query_lens]
    assert len(without_empty) == 37
    for line in without_empty:
        inputs, expected = recorded(line)
        assert chunks(planner(**arguments(inputs))) == expected, line


def test_some_recorded_plans_have_the_empty_chunk_that_the_fix_is_about():
    empty = [
        line
        for line in CASES
        if any(chunk.query_start == chunk.query_end for chunk in recorded(line)[1])
    ]
    assert len(empty) == 54


def test_a_changed_plan_breaks_its_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    manifest = read_manifest(Path(__file__).parents[3] / "goldens" / NAME)
    write_manifest(tmp_path / NAME, dataclasses.replace(manifest, entries=manifest.entries[:2]))
    path = tmp_path / NAME / "manifest.json"
    assert manifest.entries[0].file is None
    path.write_text(path.read_text().replace("1454, 1695", "1454, 1696"))
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    with pytest.raises(Exception, match="is damaged: its content has the seal"):
        GoldenImplementation(NAME, SUITES).run(make_inputs(parse_case(manifest.entries[0].case)))
