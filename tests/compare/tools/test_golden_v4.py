"""Results of the V4 prefill path and of its stages: recorded, and compared with from then on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from compare.goldens.format import DamagedGolden, read_manifest
from compare.goldens.implementation import GoldenImplementation
from compare.protocol.case import Case
from compare.protocol.inputs import Inputs
from compare.recording.record import RecordingRefused, record
from compare.run import registry
from compare.suites.table import SUITES, default_cases, make_inputs, parse_case
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.recorded import V4PrefillRecords
from tests.compare.cli.command_line import command_line

FULL = "v4-prefill:seq=90+37+5,q=2+3+0,topk=8,h=6,sink=mixed"
EXACT = "v4-prefill:seq=90,q=2,ratio=1,h=4,format=bf16,data=exact"
STAGE = "v4-stages:stage=gather,seq=40,q=2,ratio=1,spare=2"


class EagerPath:
    """The eager path under another name; `change` makes a wrong one of it."""

    name = "eager"
    suites = frozenset({"v4-prefill"})

    def __init__(self, change=lambda result: result) -> None:
        self.change = change

    def supports(self, case: Case) -> str | None:
        return None

    def run(self, inputs: Inputs) -> V4PrefillResult:
        result = registry.in_process("torch", "cpu").run(inputs)
        assert isinstance(result, V4PrefillResult)
        return self.change(result)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_tree) -> Path:
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    return tmp_path / "cpu" / "eager_v4"


def inputs_of(line: str) -> V4PrefillInputs:
    made = make_inputs(parse_case(line))
    assert isinstance(made, V4PrefillInputs)
    return made


def test_a_recording_comes_back_as_it_was(folder: Path) -> None:
    assert record(EagerPath(), [FULL, EXACT], folder).recorded == (FULL, EXACT)
    golden = GoldenImplementation("cpu/eager_v4", SUITES)
    assert golden.suites == {"v4-prefill"}
    for line in (FULL, EXACT):
        whole, kept = EagerPath().run(inputs_of(line)), golden.run(inputs_of(line))
        assert isinstance(kept, V4PrefillResult) and kept.out_rows is not None
        assert kept.lse.tobytes() == whole.lse.tobytes()
        assert kept.max_logits is not None and whole.max_logits is not None
        assert kept.max_logits.tobytes() == whole.max_logits.tobytes()
        assert kept.out.tobytes() == whole.out.reshape(-1, 512)[kept.out_rows].tobytes()
        assert kept.plan is None and kept.stages is None
    assert record(EagerPath(), [FULL], folder).kept == (FULL,)


def test_a_kernel_without_max_logits_is_recorded_without_them(folder: Path) -> None:
    without = EagerPath(lambda result: dataclasses.replace(result, max_logits=None))
    record(without, [FULL], folder)
    (entry,) = read_manifest(folder).entries
    assert sorted(entry.tensors) == ["lse", "out", "out_rows"]
    found = GoldenImplementation("cpu/eager_v4", SUITES).run(inputs_of(FULL))
    assert isinstance(found, V4PrefillResult) and found.max_logits is None


def test_a_wrong_result_is_not_recorded(folder: Path) -> None:
    wrong = EagerPath(lambda result: dataclasses.replace(result, lse=result.lse + np.float32(1)))
    with pytest.raises(RecordingRefused, match="the judge says"):
        record(wrong, [FULL], folder)


def test_other_inputs_than_the_recorded_are_damage(folder: Path) -> None:
    record(EagerPath(), [FULL], folder)
    inputs = inputs_of(FULL)
    inputs.swa_cache[0, 0] ^= 1
    with pytest.raises(DamagedGolden, match="it isn't the same case"):
        GoldenImplementation("cpu/eager_v4", SUITES).run(inputs)


def test_a_recorded_path_is_compared_with(folder: Path) -> None:
    record(EagerPath(), [FULL], folder)
    words = ["run", FULL, "--candidate", "torch", "--reference", "golden:cpu/eager_v4"]
    found = command_line(*words)
    assert found.status == 0, found.out
    assert "v4-prefill against golden:cpu/eager_v4" in found.out.splitlines()


def test_stages_are_recorded_from_a_batch_without_their_inputs(folder: Path) -> None:
    record("torch", [STAGE], folder, device="cpu")
    (entry,) = read_manifest(folder).entries
    assert sorted(entry.tensors) == ["out.rows", "out.values"]
    words = ["run", STAGE, "--candidate", "torch", "--reference", "golden:cpu/eager_v4"]
    found = command_line(*words)
    assert found.status == 0, found.out
    assert "v4-stages against golden:cpu/eager_v4" in found.out


def test_two_kernels_results_of_the_default_cases_fit_their_share() -> None:
    share, total = V4PrefillRecords.share, 0
    for case in default_cases("v4-prefill"):
        rows = case.tokens * case.h  # type: ignore[attr-defined]
        total += rows * share.statistics + share.rows(rows) * 1024 + 1500
    assert total < 600_000 < V4PrefillRecords.largest_folder
