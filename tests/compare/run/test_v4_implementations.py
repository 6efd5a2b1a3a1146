"""The V4 path's implementations: what they are given and refuse, and how plans reach them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from compare.goldens.files import golden_cases
from compare.goldens.implementation import GoldenImplementation
from compare.isolation.transfer import fingerprint
from compare.protocol.implementation import Unsupported
from compare.run import registry
from compare.suites.table import SUITES, default_cases, make_inputs, parse_case
from compare.suites.v4_prefill.call import V4PrefillInputs
from compare.suites.v4_prefill.jax_adapter import JaxV4Prefill
from compare.suites.v4_prefill.torch_adapter import TorchV4Prefill
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.jax_adapter import JaxV4Stages
from compare.suites.v4_stages.torch_adapter import TorchV4Stages
from tests.compare.run.test_transfer import carried

RECORDED = "engine/vllm-0.33.0-stages"


def inputs_of(words: str) -> V4PrefillInputs:
    made = make_inputs(parse_case(f"v4-prefill:{words}"))
    assert isinstance(made, V4PrefillInputs)
    return made


def stage_of(line: str) -> V4StagesInputs:
    made = make_inputs(parse_case(line))
    assert isinstance(made, V4StagesInputs)
    return made


def plan_of(words: str) -> list[tuple[int, ...]] | None:
    plan = inputs_of(words).prescribed_plan
    return None if plan is None else [tuple(vars(chunk).values()) for chunk in plan]


def test_by_the_fixed_rules_an_implementation_plans_itself() -> None:
    assert plan_of("seq=300+70,q=3+4") is None


def test_alone_gives_each_request_with_tokens_a_chunk_of_the_host_s_lengths() -> None:
    found = plan_of("seq=300+90+70,q=3+0+4,start=5,bound=6,plan=alone")
    assert found == [(0, 1, 76, 206, 0, 3), (2, 3, 19, 95, 3, 7)]
    assert plan_of("seq=300,q=3,ratio=1,plan=alone") == [(0, 1, 0, 130, 0, 3)]


def test_the_shipped_plan_has_the_chunks_without_tokens() -> None:
    """vllm-project/vllm#49059."""
    words = "seq=40+40+16+64+0,q=0+5+0+3+0,topk=16,window=8,max_len=64,max_tokens=16,chunk=1"
    plan = plan_of(f"{words},plan=vllm-0.33.0")
    assert plan is not None and len(plan) == 5
    assert sum(start == end for *_, start, end in plan) == 3


def test_a_plan_with_an_empty_chunk_is_none_that_jax_runs() -> None:
    inputs = inputs_of(
        "seq=40+40,q=0+5,h=2,window=8,max_len=64,max_tokens=16,chunk=1,plan=vllm-0.33.0"
    )
    with pytest.raises(Unsupported, match="chunk 0 of the plan has no query tokens"):
        JaxV4Prefill("xla", "cpu").run(inputs)
    assert TorchV4Prefill("torch", "cpu").run(inputs).out.shape == (5, 2, 512)


@pytest.mark.parametrize("words", ["seq=300+70+5,q=3+4+5,h=2", "seq=150+90,q=2+1,h=2,ratio=1"])
def test_torch_gives_the_same_bits_under_every_plan(words: str) -> None:
    torch = TorchV4Prefill("torch", "cpu")
    fixed, alone, shipped = (
        torch.run(inputs_of(f"{words},plan={rules}")) for rules in ("fixed", "alone", "vllm-0.33.0")
    )
    assert fixed.plan is not None and alone.plan is not None
    assert len(fixed.plan) == 1 and len(alone.plan) == words.split(",")[1].count("+") + 1
    for other in (alone, shipped):
        for tensor in ("out", "lse", "max_logits"):
            assert getattr(fixed, tensor).tobytes() == getattr(other, tensor).tobytes()


def test_torch_gives_a_stage_for_each_chunk() -> None:
    found = TorchV4Prefill("torch", "cpu").run(inputs_of("seq=300+70,q=3+4,h=2,plan=alone"))
    assert found.plan is not None and found.stages is not None and len(found.stages) == 2
    for chunk, stage in zip(found.plan, found.stages, strict=True):
        assert stage.workspace.shape == (1, chunk.workspace_rows, 512)
        assert stage.indices.shape == (chunk.query_end - chunk.query_start, 256)
        assert stage.indices.dtype == stage.lengths.dtype == np.int32
        assert (stage.lengths > 0).all()


@pytest.mark.parametrize("line", golden_cases(RECORDED))
def test_torch_gives_what_the_engine_s_own_stages_gave(line: str) -> None:
    inputs = stage_of(line)
    expected = GoldenImplementation(RECORDED, SUITES).run(inputs)
    found = TorchV4Stages("torch", "cpu").run(inputs)
    assert isinstance(expected, V4StagesResult)
    assert expected.arrays.keys() == found.arrays.keys()
    for name, array in expected.arrays.items():
        mine = found.arrays[name]
        assert (mine.dtype, mine.shape) == (array.dtype, array.shape)
        assert mine.tobytes() == array.tobytes(), name


def test_a_stage_leaves_its_inputs_as_they_were() -> None:
    inputs = stage_of("v4-stages:stage=gather,seq=90,q=2,ratio=1,spare=2")
    before = inputs.sha256()
    found = TorchV4Stages("torch", "cpu").run(inputs)
    assert inputs.sha256() == before
    workspace = inputs.arguments["workspace"]
    assert isinstance(workspace, np.ndarray)
    assert found.arrays["workspace"].tobytes() != workspace.tobytes()
    assert found.arrays["workspace"][:, 90:].tobytes() == workspace[:, 90:].tobytes()


def test_the_interpreter_takes_small_cases() -> None:
    interpreter = registry.find("pallas-interpret")
    fits = parse_case("v4-prefill:seq=300,q=32")
    assert interpreter.supports(fits) is None
    assert registry.find("pallas-fused-interpret").supports(fits) is None
    reason = interpreter.supports(parse_case("v4-prefill:seq=300,q=33"))
    assert "at most 128 blocks of 64 keys x 64 heads" in str(reason)
    big = parse_case("v4-stages:stage=gather,seq=2000,q=1900,ratio=1")
    assert "gathers at most 1024 tokens; these are 2000" in str(interpreter.supports(big))
    assert registry.find("xla").supports(big) is None


def test_lists_are_made_by_xla_alone() -> None:
    case = parse_case("v4-stages:stage=combine,seq=9,q=1")
    for name in ("pallas", "pallas-interpret"):
        assert "has no kernel: xla computes it" in str(JaxV4Stages(name, "cpu").refuses(case))
    assert registry.find("xla").supports(case) is None


def test_attention_without_a_workspace_is_for_fp8_pages() -> None:
    for name in ("xla-fused", "pallas-fused-interpret"):
        reason = registry.find(name).supports(parse_case("v4-prefill:seq=9,q=1,format=bf16"))
        assert reason == "format=bf16: attention without a workspace reads pages of v4-fp8"


def test_own_candidates_and_references_of_the_v4_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.here("v4-prefill", "cpu") == [
        "xla",
        "pallas-interpret",
        "xla-fused",
        "pallas-fused-interpret",
    ]
    assert registry.here("v4-stages", "cpu") == ["xla", "pallas-interpret"]
    assert registry.default_reference("v4-stages", "cpu") == f"golden:{RECORDED}"
    monkeypatch.setattr("compare.goldens.files.available", lambda: ["h200/flash_mla_v4"])
    assert registry.default_reference("v4-prefill", "cpu") == "golden:h200/flash_mla_v4"


def test_flash_mla_needs_a_gpu() -> None:
    case = default_cases("v4-prefill")[0]
    for name in ("flash_mla", "flash_mla-fp8"):
        assert "GPU" in str(registry.find(name, "cpu").supports(case))


def test_inputs_and_results_come_whole_through_another_process() -> None:
    whole = inputs_of("seq=300+70,q=3+4,h=2,plan=alone,bound=2,images=1:66-69,max_image=4")
    stage = stage_of("v4-stages:stage=gather,seq=90,q=2,ratio=1")
    for inputs in (whole, stage):
        arrived = carried(inputs)
        assert arrived.sha256() == inputs.sha256() and fingerprint(arrived) == fingerprint(inputs)
    gathered = TorchV4Stages("torch", "cpu").run(stage)
    (name,) = gathered.arrays
    assert carried(gathered).arrays[name].tobytes() == gathered.arrays[name].tobytes()
    found = TorchV4Prefill("torch", "cpu").run(whole)
    back = carried(found)
    assert back.plan == found.plan and found.stages and len(back.stages) == len(found.stages)
    for sent, got in zip(found.stages, back.stages, strict=True):
        for field in ("workspace", "indices", "lengths"):
            assert getattr(got, field).tobytes() == getattr(sent, field).tobytes()


@pytest.mark.parametrize("name", ["cache", "workspace", "seq_lens", "offset"])
def test_a_fingerprint_shows_a_changed_argument_of_a_stage(name: str) -> None:
    inputs = stage_of("v4-stages:stage=gather,seq=90,q=2,ratio=1")
    value = inputs.arguments[name]
    other = value + 1 if name == "offset" else value.copy()  # type: ignore[operator, union-attr]
    if name != "offset":
        other.view(np.uint8).reshape(-1)[0] ^= 1  # type: ignore[union-attr]
    changed = dataclasses.replace(inputs, arguments={**inputs.arguments, name: other})
    assert fingerprint(changed) != fingerprint(inputs)
    assert changed.sha256() != inputs.sha256()
