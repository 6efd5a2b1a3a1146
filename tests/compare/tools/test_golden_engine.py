"""What `record` writes of an engine: its plans, and calls of its stages with their inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compare.goldens.format import Manifest, find_golden, read_manifest
from compare.goldens.implementation import GoldenImplementation
from compare.judging.plans import PlanResult
from compare.recording import record as golden_record
from compare.recording.record import RecordingRefused, record
from compare.report.environment import environment
from compare.run import registry
from compare.suites.table import SUITES, make_inputs, parse_case
from tests.compare.cli.command_line import command_line
from tests.torch_ref.cuda import test_vllm_adapter, test_vllm_stages
from tests.torch_ref.cuda.conftest import install  # noqa: F401

PLANS, STAGES = "engine/vllm-0.33.0", "engine/vllm-0.33.0-stages"
MADE = "v4-stages:stage=combine,seq=300+60,q=20+12,ratio=1"
PLANNER = """
import dataclasses
import torch_ref.planning

@dataclasses.dataclass
class DeepseekSparseSWAMetadata:
    num_prefills: int
    prefill_seq_lens_cpu: object
    prefill_query_lens_cpu: object
    prefill_window_size: int
    prefill_max_model_len: int
    prefill_max_num_batched_tokens: int

    def get_prefill_chunk_plan(self, compress_ratio, prefill_chunk_size, has_compressed=None):
        plan = torch_ref.planning.plan_prefill_chunks(
            self.prefill_seq_lens_cpu.tolist(),
            self.prefill_query_lens_cpu.tolist(),
            compress_ratio=compress_ratio,
            window=self.prefill_window_size,
            max_model_len=self.prefill_max_model_len,
            max_num_batched_tokens=self.prefill_max_num_batched_tokens,
            chunk_size=prefill_chunk_size,
            has_compressed=has_compressed,
            rules="vllm-0.33.0",
        )
        return [(c.start, c.end, c.compressed_rows, c.workspace_rows{more}) for c in plan]
"""


@pytest.fixture
def engine(
    install: Callable[..., None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    clean_tree: str,
) -> Callable[..., None]:
    """A fake vLLM 0.33.0 with the planner and the stages of the real one, for the CPU.

    more: after each chunk's workspace rows.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def make(more: str = "") -> None:
        planner = PLANNER.replace("{more}", more)
        install(test_vllm_adapter.MODULE, planner, test_vllm_adapter.VERSION)
        install(test_vllm_stages.OPS, test_vllm_stages.engine(), test_vllm_stages.VERSION)

    return make


@pytest.fixture
def place() -> str:
    return environment().get("gpu", "a CPU")


def shipped(name: str) -> Manifest:
    folder = find_golden(name)
    assert folder is not None
    return read_manifest(folder)


def test_the_recorded_plans_are_recorded_again(engine, place: str, tmp_path: Path) -> None:
    engine()
    folder = tmp_path / "engine" / "vllm"
    words = ["record", "prefill-plan", "--kernel", "vllm", "--out", str(folder)]
    found = command_line(*words)
    assert (found.status, found.out) == (0, f"{folder}: 200 recorded, 0 kept as they were\n")
    written, known = read_manifest(folder), shipped(PLANS)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert written.name == "engine/vllm" and written.suite == "prefill-plan"
    assert written.source == f"vllm 0.33.0, its own planner run on {place}"
    for mine, theirs in zip(written.entries, known.entries, strict=True):
        assert (mine.case, mine.facts) == (theirs.case, theirs.facts)
    assert all(e.build == {"name": "vllm", "version": "0.33.0"} for e in written.entries)
    again = command_line(*words)
    assert again.out == f"{folder}: 0 recorded, 200 kept as they were\n"


def test_recorded_plans_come_back(
    engine, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    lines = [entry.case for entry in shipped(PLANS).entries[:5]]
    planner = registry.in_process("vllm", "cpu")
    record(planner, lines, tmp_path / "engine" / "plans")
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    golden = GoldenImplementation("engine/plans", SUITES)
    for line in lines:
        inputs = make_inputs(parse_case(line))
        found, expected = golden.run(inputs), planner.run(inputs)
        assert isinstance(found, PlanResult) and isinstance(expected, PlanResult)
        assert found.chunks == expected.chunks
        assert found.notes == (f"recorded on {place} from vllm 0.33.0", "vLLM 0.33.0")


def test_a_plan_by_neither_rules_is_not_recorded(engine, tmp_path: Path) -> None:
    engine(" + 1")
    lines = [entry.case for entry in shipped(PLANS).entries[:2]]
    with pytest.raises(RecordingRefused, match="the judge says: P") as refusal:
        record(registry.in_process("vllm", "cpu"), lines, tmp_path / "engine" / "plans")
    assert list(refusal.value.recording.refused) == lines


def test_the_recorded_calls_of_stages_are_recorded_again_with_their_inputs(
    engine, place: str, tmp_path: Path
) -> None:
    engine()
    known = shipped(STAGES)
    folder = tmp_path / "engine" / "stages"
    lines = [entry.case for entry in known.entries]
    words = ["record", *lines, MADE, "--kernel", "vllm", "--out", str(folder)]
    found = command_line(*words)
    assert (found.status, found.out) == (0, f"{folder}: 43 recorded, 0 kept as they were\n")
    written = read_manifest(folder)
    assert written.suite == "v4-stages"
    assert written.source == f"vllm 0.33.0, its own stage functions run on {place}"
    *stored, made = written.entries
    for mine, theirs in zip(stored, known.entries, strict=True):
        assert (mine.case, mine.facts) == (theirs.case, theirs.facts)
        assert (mine.input_sha256, mine.tensors) == (theirs.input_sha256, theirs.tensors)
        assert mine.build == theirs.build == {"name": "vllm", "version": "0.33.0"}
        assert mine.generator_version == ""
    assert made.generator_version and not any(name.startswith("in.") for name in made.tensors)


def test_an_engine_that_is_not_here_is_said(tmp_path: Path, clean_tree: str) -> None:
    if (reason := registry.reason("vllm")) is None:
        pytest.skip("vLLM is importable here")
    with pytest.raises(golden_record.KernelNotAvailable) as refusal:
        record("vllm", [MADE], tmp_path / "engine" / "stages")
    assert str(refusal.value) == f"vllm can't run here: {reason}"
