"""Tensors and results of one's own that can't be judged are refused in a sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import compare
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.verdict import Status
from compare.run import registry
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.table import make_inputs, parse_case

DECODE = "dcp-decode:lens=37+5,q=3+1,h=3,page=32,world=2,rank=1"
PREFILL = "sparse-prefill:s_q=2,s_kv=40,h=4"


@pytest.fixture(scope="module")
def inputs() -> DcpDecodeInputs:
    made = make_inputs(parse_case(DECODE))
    assert isinstance(made, DcpDecodeInputs)
    return made


@pytest.fixture(scope="module")
def right(inputs: DcpDecodeInputs) -> DcpDecodeResult:
    found = registry.find("torch", "cpu").run(inputs)
    assert isinstance(found, DcpDecodeResult)
    return found


def as_mapping(inputs: DcpDecodeInputs) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(inputs))
    return {name: getattr(inputs, name) for name in names if name not in ("case", "shards")}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_query_len": 2}, "max_query_len: 2; accepted: 3 and more, the longest query"),
        ({"max_query_len": 0}, "max_query_len: 0; accepted: 3 and more"),
        ({"max_query_len": 3.5}, "max_query_len: 3.5; accepted: a whole number"),
        ({"max_query_len": "3"}, "max_query_len: '3'; accepted: a whole number"),
        ({"dcp_rank": "1"}, "dcp_rank: '1'; accepted: a whole number"),
        ({"dcp_rank": None}, "dcp_rank: None; accepted: a whole number"),
        ({"dcp_world": 2.0}, "dcp_world: 2.0; accepted: a whole number"),
        ({"interleave": True}, "interleave: True; accepted: a whole number"),
    ],
)
def test_numbers_of_a_decode_call_are_checked_in_a_mapping_and_in_inputs(
    inputs: DcpDecodeInputs, right: DcpDecodeResult, changes: dict[str, Any], said: str
) -> None:
    for given in (as_mapping(inputs) | changes, dataclasses.replace(inputs, **changes)):
        with pytest.raises(ValueError, match=said):
            compare.judge("dcp-decode", given, right)


@pytest.mark.parametrize("value", ["a", [1, 2], object()])
def test_a_scale_that_is_no_number_is_refused(
    inputs: DcpDecodeInputs, right: DcpDecodeResult, value: Any
) -> None:
    with pytest.raises(ValueError, match=r"sm_scale: .*; accepted: a finite number"):
        compare.judge("dcp-decode", as_mapping(inputs) | {"sm_scale": value}, right)


def test_boundaries_that_are_no_list_are_refused(inputs: DcpDecodeInputs, right: DcpDecodeResult):
    given = as_mapping(inputs) | {"query_start_loc": np.array(4, np.int32), "max_query_len": None}
    with pytest.raises(ValueError, match=r"query_start_loc: .*accepted: \[B \+ 1\] whole numbers"):
        compare.judge("dcp-decode", given, right)


@pytest.mark.parametrize("name", ["q", "kv_cache", "seq_lens", "query_start_loc"])
def test_inputs_that_hold_lists_are_refused(
    inputs: DcpDecodeInputs, right: DcpDecodeResult, name: str
) -> None:
    changed = dataclasses.replace(inputs, **{name: [1, 2]})
    with pytest.raises(TypeError, match=f"inputs: {name} is a list; accepted: a NumPy array"):
        compare.judge("dcp-decode", changed, right)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"out_rows": [0]}, "result: out_rows is a list; accepted: a NumPy array"),
        ({"out": [1.0]}, "result: out is a list"),
        ({"lse": torch.zeros(4, 3)}, "result: lse is a Tensor"),
        ({"lse": None}, "result: lse is a NoneType"),
    ],
)
def test_a_result_that_holds_no_arrays_is_refused(
    inputs: DcpDecodeInputs, right: DcpDecodeResult, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        compare.judge("dcp-decode", inputs, dataclasses.replace(right, **changes))


def test_a_result_of_another_suite_is_refused(inputs: DcpDecodeInputs, right: DcpDecodeResult):
    other = SparsePrefillResult(out=right.out, lse=right.lse)
    with pytest.raises(TypeError, match="is a SparsePrefillResult; accepted: a DcpDecodeResult"):
        compare.judge("dcp-decode", inputs, other)
    with pytest.raises(TypeError, match="reference is a SparsePrefillResult"):
        compare.judge("dcp-decode", inputs, right, reference=other)


@pytest.mark.parametrize("parts", ["float16", None])
def test_unknown_parts_are_refused_by_name(
    inputs: DcpDecodeInputs, right: DcpDecodeResult, parts: Any
) -> None:
    changed = dataclasses.replace(right, parts=parts)
    for given in ({"result": changed}, {"result": right, "reference": changed}):
        with pytest.raises(ValueError, match=f"parts is {parts!r}; accepted: float32, bfloat16, "):
            compare.judge("dcp-decode", inputs, **given)


def test_out_without_any_row_is_not_what_is_due(inputs: DcpDecodeInputs, right: DcpDecodeResult):
    none = {"out": right.out.reshape(-1, 512)[:0], "out_rows": np.zeros(0, np.int32)}
    verdict = compare.judge("dcp-decode", inputs, dataclasses.replace(right, **none))
    assert verdict.status is Status.SHAPE
    assert "out_rows is empty: at least one of the 12 rows" in verdict.reason


def test_the_same_holds_for_sparse_prefill():
    made = make_inputs(parse_case(PREFILL))
    assert isinstance(made, SparsePrefillInputs)
    found = registry.find("torch", "cpu").run(made)
    assert isinstance(found, SparsePrefillResult)
    none = {"out": found.out.reshape(-1, 512)[:0], "out_rows": np.zeros(0, np.int32)}
    verdict = compare.judge("sparse-prefill", made, dataclasses.replace(found, **none))
    assert verdict.status is Status.SHAPE
    with pytest.raises(TypeError, match="inputs: kv is a list"):
        compare.judge("sparse-prefill", dataclasses.replace(made, kv=[1]), found)


def test_a_suite_that_is_no_name_is_refused(inputs: DcpDecodeInputs, right: DcpDecodeResult):
    with pytest.raises(ValueError, match="suite: 5; accepted: sparse-prefill, "):
        compare.judge(5, inputs, right)  # type: ignore[arg-type]
