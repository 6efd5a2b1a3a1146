"""Decode in the registry: what runs here, what is refused in words, and the planners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

import torch_ref
from compare.judging.plans import DecodePlanResult
from compare.run import registry
from compare.run.together import Together
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.cuda_adapter import (
    CudaDcpDecode,
    FlashInferCuteDsl,
    FlashInferDecode,
    FlashMlaDecode,
)
from compare.suites.dcp_decode.implementation import DcpDecode
from compare.suites.table import make_inputs, parse_case, suite_of
from torch_ref.decode.inputs import DecodeInputs

DECODE = "dcp-decode:lens=37+5,q=3+1,h=3,page=32,world=2"


def plan(name: str, words: str) -> DecodePlanResult:
    result = registry.find(name).run(make_inputs(parse_case(f"decode-plan:{words}")))
    assert isinstance(result, DecodePlanResult)
    return result


def test_one_name_answers_each_suite_with_its_own() -> None:
    eager = registry.find("torch", "cpu")
    assert eager.suites == {
        "sparse-prefill",
        "dcp-decode",
        "v4-prefill",
        "v4-stages",
        "dcp-sparse",
    }
    for line in (DECODE, "sparse-prefill:s_kv=40,h=2", "v4-prefill:seq=9,q=1,h=2"):
        inputs = make_inputs(parse_case(line))
        assert eager.supports(parse_case(line)) is None
        assert (
            type(eager.run(inputs))
            .__name__.lower()
            .startswith(suite_of(inputs).name.replace("-", "")[:3])
        )


def test_a_name_is_unavailable_only_where_none_of_its_suites_runs() -> None:
    class Part(DcpDecode):
        def unavailable(self) -> str | None:
            return self.device

    here, gone = Part("a", None), Part("b", "it is Monday")
    assert Together("both", {"x": here, "y": gone}).unavailable() is None
    assert Together("both", {"x": gone, "y": gone}).unavailable() == "it is Monday"


@pytest.mark.parametrize("name", ["torch", "xla"])
def test_one_rank_s_decode_gives_bfloat16_and_natural_lse(name: str) -> None:
    """A zero query attends to all visible keys alike: lse is ln of their number."""
    inputs = make_inputs(parse_case(DECODE))
    inputs.q[:] = 0  # type: ignore[union-attr]
    result = registry.find(name, "cpu").run(inputs)
    assert isinstance(result, DcpDecodeResult)
    assert result.out.shape == (4, 3, 512) and result.out.dtype.name == "bfloat16"
    # Bounds 35, 36, 37 and 5; rank 0 holds the even positions.
    np.testing.assert_allclose(np.exp(result.lse[:, 0]), [18, 18, 19, 3], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("xla", "page=16", "takes pages of 32, 64, 128 keys"),
        ("pallas-interpret", "lens=9000,q=1,h=65", "at most 64 blocks of 128 keys x 64"),
        ("pallas-interpret", "lens=4096,q=1,h=65", None),
        ("pallas-interpret", "lens=8192,q=1,h=65,world=2,rank=all", "at most 64 blocks"),
        ("flash_mla", "", "GPU"),
        ("flashinfer-fa3", "", "GPU"),
        ("flashinfer-fa2", "", "GPU"),
        ("flashinfer-cute-dsl", "", "GPU"),
    ],
)
def test_what_a_name_does_not_serve_is_said(name: str, words: str, reason: str | None) -> None:
    words = words if "lens" in words else f"lens=9,q=1,{words}".rstrip(",")
    found = registry.find(name, "cpu").supports(parse_case(f"dcp-decode:{words}"))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("flash_mla", "page=32", "takes pages of 64 keys"),
        ("flash_mla", "kv=e4m3", "kv_cache of torch.float8_e4m3fn: this adapter runs"),
        ("flash_mla", "kv=e4m3,q_dtype=e4m3", "q of torch.float8_e4m3fn: this adapter runs"),
        ("flashinfer-fa3", "kv=e4m3,q_dtype=e4m3", "take bf16 queries"),
        ("flashinfer-cute-dsl", "world=2,interleave=4", "deals keys out one by one only"),
        ("flashinfer-cute-dsl", "kv=e4m3", "accepted is one dtype for both"),
        ("flashinfer-fa3", "sm_scale=-1.0", "accepted is a positive number"),
        ("flashinfer-fa3", "nan=key", "lose a NaN in their running maximum"),
    ],
)
def test_a_kernel_s_limits_have_its_adapter_s_words(name: str, words: str, reason: str) -> None:
    make = registry.TABLE[name].offers["dcp-decode"].implementation
    case = parse_case(f"dcp-decode:lens=9,q=1,{words}")
    assert reason in str(make("cuda").refuses(case))  # type: ignore[attr-defined]


def test_the_kernel_with_one_dtype_for_both_takes_float8_queries_with_float8_keys() -> None:
    case = parse_case("dcp-decode:lens=9,q=1,kv=e4m3,q_dtype=e4m3")
    assert "accepted is one dtype" not in str(FlashInferCuteDsl("x", "cuda").refuses(case))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torch", "xla", "pallas-interpret"])
def test_float8_queries_stand_for_the_stored_numbers_times_their_scale(name: str) -> None:
    """The scale may as well be one of sm_scale: the product is what counts."""
    inputs = make_inputs(parse_case(f"{DECODE},kv=e4m3,q_dtype=e4m3"))
    assert isinstance(inputs, DcpDecodeInputs) and inputs.q_scale == 5 / 512
    moved = dataclasses.replace(inputs, q_scale=None, sm_scale=inputs.sm_scale * 5 / 512)
    ours, same, other = (
        registry.find(name, "cpu").run(each).lse  # type: ignore[union-attr]
        for each in (inputs, moved, dataclasses.replace(inputs, q_scale=None))
    )
    np.testing.assert_allclose(ours, same, rtol=1e-6)
    assert np.abs(ours - other).max() > 1


def test_references_of_decode_are_the_kernels_then_what_was_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = ["h200/flash_mla", "h200/flash_mla_decode", "h200/flashinfer_fa3"]
    monkeypatch.setattr("compare.goldens.files.available", lambda: recorded)
    assert registry.default_reference("dcp-decode", "cpu") == "golden:h200/flash_mla_decode"
    assert registry.default_reference("decode-plan", "cpu") is None
    monkeypatch.setattr(registry, "reason", lambda name, device, suite=None: None)
    assert registry.default_reference("dcp-decode") == "flash_mla"


def test_candidates_of_decode_are_this_project_s_own() -> None:
    assert registry.here("dcp-decode", "cpu") == ["xla", "pallas-interpret"]
    assert registry.here("decode-plan", "cpu") == ["jax-planner", "torch-planner"]


@pytest.mark.parametrize("name", ["jax-planner", "torch-planner"])
def test_the_planners_give_every_row_its_request_bound_and_local_count(name: str) -> None:
    """vllm-project/vllm#52500: query lengths 6, 2, 1 are no view of 3 + 3 + 3."""
    found = plan(name, "lens=20+9+4,q=6+2+1,world=2,rank=1,pad_rows=1")
    assert found.ragged
    assert found.request[:9] == (0, 0, 0, 0, 0, 0, 1, 1, 2)
    assert found.bound == (15, 16, 17, 18, 19, 20, 8, 9, 4, 0)
    assert found.local_counts == (7, 8, 8, 9, 9, 10, 4, 4, 2, 0)
    assert found.padding == (False,) * 9 + (True,)


def test_the_shipped_rules_meet_two_bounds_for_nine_rows() -> None:
    with pytest.raises(ValueError, match="2 bounds for 9 rows"):
        plan("vllm-0.33.0", "lens=301+97,q=8+1")
    assert plan("vllm-0.33.0", "lens=130+97,q=8+2").request == (0,) * 5 + (1,) * 5


def test_the_shipped_rules_are_not_blamed_for_one_rank() -> None:
    case = parse_case("decode-plan:lens=301+97,q=8+1,world=1")
    assert "with one rank" in str(registry.find("vllm-0.33.0").supports(case))
    assert registry.find("torch-planner").supports(case) is None


@pytest.mark.parametrize(
    ("make", "module", "options"),
    [
        (lambda: FlashMlaDecode("flash_mla", "cpu"), "flash_mla_decode", {}),
        (
            lambda: FlashInferDecode("flashinfer-fa3", "cpu", backend="fa3"),
            "flashinfer_adapter",
            {"backend": "fa3"},
        ),
        (lambda: FlashInferCuteDsl("flashinfer-cute-dsl", "cpu"), "flashinfer_cute_dsl", {}),
    ],
)
def test_an_adapter_is_given_checked_inputs_and_its_notes_come_back(
    make: Callable[[], CudaDcpDecode],
    module: str,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def dcp_decode(inputs: DecodeInputs, **given: str):
        seen.append((inputs, given))
        result = torch_ref.DecodeResult(torch.full((4, 3, 512), 2.0).bfloat16(), torch.zeros(4, 3))
        return result, ("flattened",)

    monkeypatch.setattr(f"torch_ref.cuda.{module}.dcp_decode", dcp_decode)
    for cls in (FlashMlaDecode, FlashInferDecode, FlashInferCuteDsl):
        monkeypatch.setattr(cls, "build", lambda self: ("build 1",))
    result = make().call(make_inputs(parse_case(f"{DECODE},rank=1,kv=e4m3")))  # type: ignore[arg-type]
    ((inputs, given),) = seen
    assert given == options
    assert inputs.seq_lens == (18, 2) and inputs.total_lens == (37, 5)
    assert (inputs.dcp_rank, inputs.dcp_world, inputs.key_scale) == (1, 2, 3 / 256)
    assert inputs.key_counts == (17, 18, 18, 2)
    assert result.out.dtype.name == "bfloat16" and (result.out == 2).all()
    assert result.notes == ("build 1", "flattened")
