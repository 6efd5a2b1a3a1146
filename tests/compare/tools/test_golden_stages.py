"""Recorded calls of single stages: they hold their inputs, and every change of either is found."""

from __future__ import annotations

import collections
import dataclasses
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from compare.goldens.files import golden_cases, read_entry
from compare.goldens.format import (
    DamagedGolden,
    Entry,
    Manifest,
    UnknownGolden,
    read_manifest,
    write_manifest,
)
from compare.goldens.implementation import GoldenImplementation
from compare.goldens.packing import pack, unpack
from compare.protocol.records import Stored
from compare.protocol.tensor_file import write_bytes
from compare.recording.entry import entry_of
from compare.suites.table import SUITES, default_cases, make_inputs, parse_case
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.case import STAGES, V4StagesCase
from compare.suites.v4_stages.recorded import V4StagesRecords, recorded_inputs, stored_call
from compare.suites.v4_stages.torch_adapter import TorchV4Stages
from tests.compare.cli.command_line import command_line

NAME = "engine/vllm-0.33.0-stages"
HERE = Path(__file__).parents[3] / "goldens" / NAME
FACTS = {
    "build": {"name": "mine", "version": "1"},
    "gpu": "none (CPU)",
    "driver": "none",
    "torch": "2",
    "cuda": "none",
    "revision": "0123abc",
}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recorded results in a folder of their own, which goes first."""
    shutil.copytree(HERE, tmp_path / NAME)
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    return tmp_path / NAME


def kept(
    line: str, inputs: V4StagesInputs, result: V4StagesResult, *, with_inputs: bool
) -> tuple[Entry, bytes]:
    stored = stored_call(inputs, result, with_inputs=with_inputs)
    return entry_of(line, inputs, stored, (), FACTS)


def read_back(folder: Path, entry: Entry, inputs: V4StagesInputs) -> V4StagesResult:
    stored = Stored(tensors=read_entry(folder, entry), facts=entry.facts)
    return V4StagesRecords().restore(inputs, stored, ())


def stage_inputs(line: str) -> V4StagesInputs:
    made = make_inputs(parse_case(line))
    assert isinstance(made, V4StagesInputs)
    return made


def test_every_stage_has_its_recorded_calls() -> None:
    cases = [parse_case(line) for line in golden_cases(NAME)]
    assert all(isinstance(case, V4StagesCase) and case.recorded for case in cases)
    counts = collections.Counter(case.stage for case in cases)  # type: ignore[attr-defined]
    assert counts == {"combine": 30, "global_topk": 10, "gather": 2}
    assert set(cases) <= set(default_cases("v4-stages"))
    assert all("numbers" in entry.facts for entry in read_manifest(HERE).entries)
    assert sum(path.stat().st_size for path in HERE.iterdir()) < V4StagesRecords.largest_folder


def test_a_recorded_call_has_the_dtypes_that_the_stages_take() -> None:
    for line in golden_cases(NAME):
        inputs = stage_inputs(line)
        found = GoldenImplementation(NAME, SUITES).run(inputs)
        assert isinstance(found, V4StagesResult)
        assert tuple(found.arrays) == STAGES[inputs.stage] or set(found.arrays) == set(
            STAGES[inputs.stage]
        )
        arrays = [*inputs.arguments.values(), *found.arrays.values()]
        kinds = {a.dtype.name for a in arrays if isinstance(a, np.ndarray)}
        assert kinds <= {"int32", "bool", "uint8", "bfloat16"}
        assert "vllm 0.33.0" in found.notes[0]


@pytest.mark.parametrize(
    ("line", "tensor"),
    [
        ("v4-stages:stage=combine,record=7", "in.topk_indices"),
        ("v4-stages:stage=gather,record=1", "in.cache"),
        ("v4-stages:stage=gather,record=1", "out.values"),
        ("v4-stages:stage=global_topk,record=3", "out.slots"),
    ],
)
def test_one_flipped_bit_is_found(copy: Path, line: str, tensor: str) -> None:
    entry = read_manifest(copy).entry(line)
    assert entry is not None and entry.file is not None
    tensors = unpack((copy / entry.file).read_bytes())
    tensors[tensor].view(np.uint8).reshape(-1)[3] ^= 1
    (copy / entry.file).write_bytes(pack(tensors, line))
    with pytest.raises(DamagedGolden, match=f"is damaged: {tensor} has SHA-256"):
        GoldenImplementation(NAME, SUITES).run(stage_inputs(line))


def test_a_number_that_is_none_of_the_recorded_is_answered_with_how_many_there_are() -> None:
    with pytest.raises(UnknownGolden, match="holds 30 calls of stage=combine"):
        stage_inputs("v4-stages:stage=combine,record=30")


def test_other_arguments_than_the_recorded_are_damage() -> None:
    inputs = stage_inputs("v4-stages:stage=combine,record=0")
    other = dataclasses.replace(inputs, arguments={**inputs.arguments, "window": 9})
    with pytest.raises(DamagedGolden, match="it isn't the same case"):
        GoldenImplementation(NAME, SUITES).run(other)


@pytest.mark.parametrize(
    "line",
    [
        "v4-stages:stage=combine,seq=300+60,q=20+12,images=0:285-296,max_image=12,ratio=1",
        "v4-stages:stage=global_topk,seq=300+70,q=3+4,pad=1",
        "v4-stages:stage=gather,seq=300+70,q=3+4,ratio=1,offset=2,spare=3",
        "v4-stages:stage=gather,seq=300+70,q=3+4,ratio=2,format=bf16",
    ],
)
@pytest.mark.parametrize("with_inputs", [True, False])
def test_a_call_comes_back_bit_for_bit(tmp_path: Path, line: str, with_inputs: bool) -> None:
    inputs = stage_inputs(line)
    result = TorchV4Stages("torch", "cpu").run(inputs)
    entry, content = kept(line, inputs, result, with_inputs=with_inputs)
    write_bytes(tmp_path / str(entry.file), content)
    back = read_back(tmp_path, entry, inputs)
    assert back.arrays.keys() == result.arrays.keys()
    for name, array in result.arrays.items():
        assert back.arrays[name].dtype == array.dtype
        assert back.arrays[name].tobytes() == array.tobytes()
    assert any(name.startswith("in.") for name in entry.tensors) is with_inputs


def test_stored_inputs_come_back_with_a_workspace_of_equal_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = stage_inputs("v4-stages:stage=gather,seq=90+20,q=2+1,ratio=1,spare=40")
    nan = np.full((2, 130, 512), np.nan, ml_dtypes.bfloat16)
    inputs = dataclasses.replace(given, arguments={**given.arguments, "workspace": nan}, case=None)
    result = TorchV4Stages("torch", "cpu").run(inputs)
    line = "v4-stages:stage=gather,record=5"
    entry, content = kept(line, inputs, result, with_inputs=True)
    write_bytes(tmp_path / "a/b" / str(entry.file), content)
    manifest = Manifest(name="a/b", suite="v4-stages", source="", entries=(entry,))
    write_manifest(tmp_path / "a/b", manifest)
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    case = parse_case(line)
    assert isinstance(case, V4StagesCase)
    back = recorded_inputs("a/b", case)
    assert back.sha256() == inputs.sha256()
    assert read_entry(tmp_path / "a/b", entry)["in.workspace"].shape == (1, 512)
    found = read_back(tmp_path / "a/b", read_manifest(tmp_path / "a/b").entries[0], back)
    assert found.arrays["workspace"].tobytes() == result.arrays["workspace"].tobytes()


def test_numbers_that_int16_does_not_hold_stay_int32(tmp_path: Path) -> None:
    inputs = V4StagesInputs(stage="global_topk", arguments={})
    slots = np.array([[40_000, -1], [3, 4]], np.int32)
    result = V4StagesResult(arrays={"slots": slots, "lengths": np.array([1, 2], np.int32)})
    entry, content = kept("v4-stages:stage=global_topk,record=0", inputs, result, with_inputs=False)
    assert entry.tensors["out.slots"].dtype == "int32"
    assert entry.tensors["out.lengths"].dtype == "int16"
    write_bytes(tmp_path / str(entry.file), content)
    back = read_back(tmp_path, entry, inputs)
    assert back.arrays["slots"].tolist() == slots.tolist()


def test_a_call_that_is_not_recorded_costs_one_case_and_not_the_run() -> None:
    found = command_line(
        "run", "v4-stages:stage=combine,record=99", "sparse-prefill:s_kv=40,h=2,topk=64",
        "--candidate", "torch", "--verbose",
    )  # fmt: skip
    assert found.status == 3
    assert "holds 30 calls of stage=combine" in found.out + found.err
    assert "PASS    torch" in found.out
    assert "Traceback" not in found.out + found.err
