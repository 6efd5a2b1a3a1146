from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from compare.isolation.worker import Isolated
from compare.protocol.case import Case
from compare.protocol.implementation import Implementation, UnknownImplementation
from compare.run import registry
from compare.suites.table import make_inputs, parse_case
from tests.compare.cli.command_line import command_line
from tests.compare.run.conftest import PLAN_CASE


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("flashmla", "flash_mla"),
        ("palas", "pallas"),
        ("pallas-interpreter", "pallas-interpret"),
        ("jax-planer", "jax-planner"),
        ("golden:engine/vllm", "golden:engine/vllm-0.33.0"),
    ],
)
def test_a_name_that_is_off_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(UnknownImplementation, match=f"{wrong!r}; the nearest is {nearest!r}"):
        registry.find(wrong)


def test_a_file_without_its_function_is_told_what_is_missing() -> None:
    said = "'b6.py' lacks the function; write b6.py:FUNCTION"
    with pytest.raises(UnknownImplementation, match=f"^{re.escape(said)}$"):
        registry.find("b6.py")
    found = command_line("run", "sparse-prefill:s_q=2", "--candidate", "b6.py")
    assert found.status == 2
    assert said in found.err


def test_the_oracle_is_no_candidate() -> None:
    with pytest.raises(UnknownImplementation, match="the oracle judges every candidate"):
        registry.find("oracle")


@pytest.mark.parametrize("name", registry.names())
def test_every_name_gives_an_implementation_of_that_name(name: str) -> None:
    found = registry.find(name)
    assert isinstance(found, Implementation)
    assert found.name == name
    if name in registry.TABLE:
        assert found.suites == registry.TABLE[name].suites


def test_gpu_kernels_run_in_a_process_of_their_own() -> None:
    assert {name for name in registry.TABLE if isinstance(registry.find(name), Isolated)} == {
        "pallas",
        "pallas-fused",
        "flash_mla",
        "flash_mla-flattened",
        "flash_mla-fp8",
        "vllm",
        "flashinfer-fa3",
        "flashinfer-fa2",
        "flashinfer-cute-dsl",
    }


def test_a_user_s_name_is_checked_at_once(candidate_file: Callable[[str], Path]) -> None:
    path = candidate_file("def attend(query_lens): ...")
    with pytest.raises(UnknownImplementation, match="the nearest is 'attend'"):
        registry.find(f"{path}:attnd")
    found = registry.find(f"{path}:attend")
    assert isinstance(found, Isolated)
    assert found.name == f"{path}:attend"
    found.close()


def test_everything_that_can_be_named_is_described() -> None:
    described = {name: (what, reason) for name, what, reason in registry.describe("cpu")}
    assert {"oracle", *registry.names()} <= described.keys()
    assert described["xla"][1] is None and described["torch"][1] is None
    assert "Hopper" in str(described["pallas"][1])
    assert "GPU" in str(described["flash_mla"][1])
    assert all(what for what, _ in described.values())


def test_without_a_gpu_the_own_candidates_are_xla_and_the_interpreter() -> None:
    assert registry.here("sparse-prefill", "cpu") == ["xla", "pallas-interpret"]
    assert registry.here("prefill-plan", "cpu") == ["jax-planner", "torch-planner"]


def test_references_default_to_what_was_recorded_where_no_kernel_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = ["engine/vllm-0.33.0", "h200/flash_mla"]
    monkeypatch.setattr("compare.goldens.files.available", lambda: recorded)
    assert registry.default_reference("sparse-prefill", "cpu") == "golden:h200/flash_mla"
    assert registry.default_reference("prefill-plan", "cpu") == "golden:engine/vllm-0.33.0"
    monkeypatch.setattr("compare.goldens.files.available", lambda: [])
    assert registry.default_reference("sparse-prefill", "cpu") is None


@pytest.mark.parametrize(
    ("case", "fits"),
    [
        ("s_kv=300,topk=4096,h=64,s_q=2", True),
        ("s_kv=300,topk=4033,h=128", True),
        ("s_kv=300,topk=4097,h=64,s_q=2", False),
        ("s_kv=300,h=65,topk=65,s_q=33", False),
    ],
)
def test_the_interpreter_takes_128_blocks(case: str, fits: bool) -> None:
    reason = registry.find("pallas-interpret").supports(parse_case(f"sparse-prefill:{case}"))
    assert (reason is None) is fits
    assert fits or "at most 128 blocks of 64 keys x 64 heads" in str(reason)


@pytest.mark.parametrize("name", ["jax-planner", "torch-planner"])
def test_the_planners_skip_requests_without_tokens_and_the_shipped_rules_do_not(name: str) -> None:
    """vllm-project/vllm#49059: 5 chunks, 3 of them empty, where 2 are right."""
    line = "prefill-plan:seq=40+40+16+64+0,q=0+5+0+3+0,window=8,max_len=64,max_tokens=16,chunk=1"
    inputs = make_inputs(parse_case(line))

    def rows(implementation: str) -> list[tuple[int, int, int, int]]:
        chunks = registry.find(implementation).run(inputs).chunks  # type: ignore[union-attr]
        return [(c.query_start, c.query_end, c.compressed_rows, c.workspace_rows) for c in chunks]

    assert rows(name) == [(0, 5, 10, 22), (5, 8, 16, 26)]
    assert sum(start == end for start, end, _, _ in rows("vllm-0.33.0")) == 3


def wrong_suite(name: str) -> Case:
    return parse_case(PLAN_CASE if "sparse-prefill" in registry.TABLE[name].suites else
                      "sparse-prefill:s_kv=40")  # fmt: skip


@pytest.mark.parametrize("name", list(registry.TABLE))
def test_a_case_of_another_suite_is_refused_in_words(name: str) -> None:
    case = wrong_suite(name)
    assert f"isn't for {case.suite}" in str(registry.find(name).supports(case))


@pytest.mark.parametrize("name", ["xla", "torch"])
def test_a_batch_gives_the_bits_of_one_call(name: str) -> None:
    line = "sparse-prefill:q_lens=0+3+0+2,plan=vllm-0.33.0,s_kv=40,h=4,sink=mixed,length=ragged"
    inputs = make_inputs(parse_case(line))
    implementation = registry.find(name)

    pieces = implementation.run(inputs)
    whole = implementation.run(dataclasses.replace(inputs, chunks=None))
    for tensor in ("out", "lse", "max_logits"):
        assert getattr(pieces, tensor).tobytes() == getattr(whole, tensor).tobytes()
