"""A function of one's own in the suites of the V4 path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import compare
from compare.judging.plans import PlanChunk
from compare.suites.table import make_inputs, parse_case
from compare.suites.v4_prefill.call import V4_PREFILL_ARRAYS, V4PrefillInputs, V4PrefillResult
from compare.suites.v4_stages.call import V4StagesResult
from compare.user.implementation import UserImplementation
from compare.user.own_tensors import as_inputs

CASE = parse_case("v4-prefill:seq=37+5,q=3+1,h=3,page=32,topk=4,sink=mixed,bound=2,plan=alone")
PLAIN = parse_case("v4-prefill:seq=9,q=2,h=3,ratio=1,format=bf16")
GATHER = parse_case("v4-stages:stage=gather,seq=37,q=3,ratio=1")
COMBINE = parse_case("v4-stages:stage=combine,seq=37,q=3")
BF16 = np.dtype(ml_dtypes.bfloat16)


def answer(q: Any, lse: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = tuple(q.shape[:2])
    numbers = np.full(rows, lse, np.float32)
    return np.zeros((*rows, 512), BF16), numbers, numbers


def run(function: Callable[..., Any], case: Any = CASE) -> Any:
    return UserImplementation(function, device="cpu").run(make_inputs(case))


def test_a_function_gets_every_argument_by_keyword_as_torch_tensors() -> None:
    seen: dict[str, Any] = {}

    def path(q, swa_cache, **more):
        seen.update(more, q=q, swa_cache=swa_cache)
        return answer(q)

    assert isinstance(run(path), V4PrefillResult)
    fields = {field.name for field in dataclasses.fields(V4PrefillInputs)}
    assert seen.keys() == fields - {"case", "plan_rules"}
    dtypes = {name: seen[name].dtype for name in V4_PREFILL_ARRAYS}
    assert dtypes.pop("q") is torch.bfloat16 and dtypes.pop("attn_sink") is torch.float32
    assert dtypes.pop("swa_cache") is dtypes.pop("compressed_cache") is torch.uint8
    assert set(dtypes.values()) == {torch.int32}
    assert (seen["swa_page"], seen["compressed_page"], seen["kv_format"]) == (32, 64, "v4-fp8")
    assert seen["seq_lens_bound"].tolist() == [39, 7] and seen["image_spans"] is None
    assert seen["sm_scale"] == 512**-0.5 and seen["compress_ratio"] == 4


def test_without_a_compressed_cache_its_arguments_are_none() -> None:
    seen: dict[str, Any] = {}

    def path(**given):
        seen.update(given)
        return answer(given["q"])

    run(path, PLAIN)
    absent = {name for name, value in seen.items() if value is None}
    assert absent == {
        "compressed_cache", "compressed_block_table", "compressed_page", "topk_indices",
        "seq_lens_bound", "attn_sink", "image_spans",
    }  # fmt: skip
    assert seen["swa_cache"].dtype is torch.bfloat16 and seen["swa_cache"].shape[1:] == (64, 512)


@pytest.mark.parametrize(("framework", "kind"), [("numpy", np.ndarray), ("jax", jax.Array)])
def test_the_decorator_says_whose_arrays(framework: str, kind: type) -> None:
    @compare.candidate(framework=framework, device=None if framework == "numpy" else "cpu")
    def path(q, swa_cache, topk_indices, **more):
        assert all(isinstance(a, kind) for a in (q, swa_cache, topk_indices))
        return answer(q)

    assert run(path).plan is None


def test_arguments_are_copies() -> None:
    inputs = make_inputs(CASE)
    before = inputs.sha256()

    def path(q, swa_cache, **more):
        q.zero_()
        swa_cache.zero_()
        return answer(q)

    UserImplementation(path, device="cpu").run(inputs)
    assert inputs.sha256() == before


def test_a_declared_lse_is_turned_into_the_suite_s() -> None:
    @compare.candidate(lse="base2", empty_lse="-inf")
    def path(q, swa_cache, **more):
        return answer(q, lse=1.0)

    found = run(path)
    assert np.allclose(found.lse, np.log(2)) and len(found.notes) == 2


def test_a_plan_and_stages_are_taken_where_there_are_some() -> None:
    stage = SimpleNamespace(
        workspace=torch.zeros(1, 4, 512, dtype=torch.bfloat16),
        indices=torch.zeros(3, 8, dtype=torch.int32),
        lengths=torch.zeros(3, dtype=torch.int32),
    )

    def as_object(q, swa_cache, **more):
        out, maxima, lse = answer(q)
        plan = [(0, 1, 1, 4, 0, 3)]
        return SimpleNamespace(out=out, max_logits=maxima, lse=lse, plan=plan, stages=[stage])

    def as_mapping(q, swa_cache, **more):
        return vars(as_object(q, swa_cache))

    def of_mappings(q, swa_cache, **more):
        return {**as_mapping(q, swa_cache), "stages": [vars(stage)]}

    for function in (as_object, as_mapping, of_mappings):
        found = run(function)
        assert found.plan == (
            PlanChunk(
                start=0, end=1, compressed_rows=1, workspace_rows=4, query_start=0, query_end=3
            ),
        )
        assert found.stages is not None
        assert found.stages[0].workspace.dtype == BF16 and found.stages[0].indices.shape == (3, 8)


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"accepted: \(out, max_logits, lse\)"):
        run(lambda q, swa_cache, **more: 3)

    def broken_plan(q, swa_cache, **more):
        return {"out": q, "lse": q, "plan": [(1, 2)]}

    with pytest.raises(TypeError, match="as chunk 0; accepted"):
        run(broken_plan)


@pytest.mark.parametrize(
    ("stage", "kind"),
    [((1, 2, 3), "tuple"), ({"workspace": 1}, "dict"), (SimpleNamespace(), "SimpleNamespace")],
)
def test_what_is_no_stage_is_refused(stage: Any, kind: str) -> None:
    def path(q, swa_cache, **more):
        out, maxima, lse = answer(q)
        plan = [(0, 1, 1, 4, 0, 3)]
        return {"out": out, "max_logits": maxima, "lse": lse, "plan": plan, "stages": [stage]}

    message = (
        f"returned a {kind} as stage 0; accepted: an object with workspace, indices, lengths, or a "
        "mapping of these"
    )
    with pytest.raises(TypeError, match=message):
        run(path)


def test_a_stage_s_function_gets_its_name_and_arguments() -> None:
    seen: dict[str, Any] = {}

    def stage_of_mine(stage, **arguments):
        seen.update(arguments, stage=stage)
        arguments["workspace"].zero_()
        return arguments["workspace"]

    inputs = make_inputs(GATHER)
    found = UserImplementation(stage_of_mine, device="cpu").run(inputs)
    assert isinstance(found, V4StagesResult)
    assert seen["stage"] == "gather" and seen["cache"].dtype is torch.uint8
    assert seen.keys() == {"stage", *inputs.arguments}  # type: ignore[union-attr]
    assert found.arrays["workspace"].shape == (1, 37, 512)
    assert (found.arrays["workspace"] == 0).all()
    assert (inputs.arguments["workspace"] != 0).any()  # type: ignore[union-attr]


def test_a_stage_s_answer_has_its_results_in_order_or_by_name() -> None:
    indices, lengths = np.zeros((3, 256), np.int32), np.ones(3, np.int32)
    for given in ((indices, lengths), {"lengths": lengths, "indices": indices}):
        found = run(lambda stage, given=given, **arguments: given, COMBINE)
        assert (
            found.arrays["indices"].shape == (3, 256)
            and found.arrays["lengths"].tolist() == [1] * 3
        )
    with pytest.raises(TypeError, match=r"accepted: \(indices, lengths\)"):
        run(lambda stage, **arguments: indices, COMBINE)


@pytest.mark.parametrize(
    ("case", "argument"), [(CASE, "swa_cache"), (GATHER, "stage")], ids=["v4-prefill", "v4-stages"]
)
def test_a_function_without_the_telling_argument_isnt_for_the_suite(case, argument) -> None:
    reason = UserImplementation(lambda q, kv, indices: None, "mine").supports(case)
    assert f"takes no argument {argument!r}, so it isn't for {case.suite}" in str(reason)


def test_a_mapping_of_arguments_is_the_case_s_inputs() -> None:
    inputs = make_inputs(CASE)
    given = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    del given["case"]
    assert as_inputs("v4-prefill", given).sha256() == inputs.sha256()
    stage = make_inputs(GATHER)
    words = {"stage": "gather", "arguments": dict(stage.arguments)}  # type: ignore[union-attr]
    assert as_inputs("v4-stages", words).sha256() == stage.sha256()
    with pytest.raises(ValueError, match="no stage 'gathr'; the nearest is 'gather'"):
        as_inputs("v4-stages", {**words, "stage": "gathr"})
    with pytest.raises(ValueError, match="max_model_len is missing"):
        as_inputs("v4-prefill", {k: v for k, v in given.items() if k != "max_model_len"})
