"""Recorded results: every damage is found and said in a sentence."""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import compare
from compare.generate import streams
from compare.goldens.files import available, golden_cases
from compare.goldens.format import DamagedGolden, UnknownGolden, write_manifest
from compare.goldens.implementation import GoldenImplementation
from compare.goldens.packing import pack, unpack
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.case import Case
from compare.protocol.implementation import Implementation, Unsupported
from compare.protocol.tensor_file import tensor_bytes
from compare.recording.record import record
from compare.run import registry
from compare.suites.table import SUITES, default_cases, make_inputs, parse_case

LINE = "sparse-prefill:s_q=2,s_kv=100,h=4,topk=64,sink=mixed,seed=1"
NAME = "cpu/eager"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager, clean_tree) -> Path:
    """One recorded case, in a folder of its own."""
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    record(eager(), [LINE], tmp_path / NAME)
    return tmp_path / NAME


@pytest.fixture
def inputs() -> SparsePrefillInputs:
    made = make_inputs(parse_case(LINE))
    assert isinstance(made, SparsePrefillInputs)
    return made


def case_file(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors.gz")
    return path


def held(folder: Path) -> dict[str, np.ndarray]:
    return unpack(case_file(folder).read_bytes())


def rewrite(folder: Path, **changes) -> None:
    """Writes a case's file with some of its tensors changed (None: left out)."""
    tensors = held(folder) | changes
    tensors = {name: array for name, array in tensors.items() if array is not None}
    case_file(folder).write_bytes(pack(tensors, LINE))


def test_it_is_an_implementation(folder):
    assert isinstance(GoldenImplementation(NAME, SUITES), Implementation)


@pytest.mark.parametrize("tensor", ["out", "lse", "max_logits", "out_rows"])
def test_one_flipped_bit_of_a_tensor_is_found(folder, inputs, tensor):
    damaged = held(folder)[tensor]
    damaged.view(np.uint8).reshape(-1)[5] ^= 1
    rewrite(folder, **{tensor: damaged})
    with pytest.raises(DamagedGolden, match=f"{case_file(folder).name} is damaged: {tensor} has"):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_another_shape_is_found(folder, inputs):
    rewrite(folder, lse=held(folder)["lse"].reshape(4, 2))
    with pytest.raises(DamagedGolden, match=r"lse is float32 \[4, 2\] where .* float32 \[2, 4\]"):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_a_missing_tensor_is_found(folder, inputs):
    rewrite(folder, lse=None)
    with pytest.raises(DamagedGolden, match="holds the tensors max_logits, out, out_rows"):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_a_cut_file_is_found(folder, inputs):
    content = case_file(folder).read_bytes()
    case_file(folder).write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedGolden, match=f"{case_file(folder).name} is damaged: it isn't a"):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_no_changed_byte_of_a_file_changes_a_result(folder, inputs):
    golden, content = GoldenImplementation(NAME, SUITES), case_file(folder).read_bytes()
    whole, found = golden.run(inputs), 0
    assert isinstance(whole, SparsePrefillResult) and whole.max_logits is not None
    places = range(4, len(content), 31)
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        case_file(folder).write_bytes(changed)
        try:
            got = golden.run(inputs)
        except DamagedGolden as error:
            assert case_file(folder).name in str(error)
            found += 1
            continue
        assert isinstance(got, SparsePrefillResult) and got.max_logits is not None
        for name in ("out", "lse", "max_logits", "out_rows"):
            assert getattr(got, name).tobytes() == getattr(whole, name).tobytes()
    assert found >= len(places) - 1  # the first one only says when the file was written


@pytest.mark.parametrize(
    "other",
    [lzma.compress, bytes, gzip.compress, lambda content: b""],
    ids=["xz", "not at all", "whole elements", "empty"],
)
def test_a_file_that_is_packed_otherwise_is_found(folder, inputs, other):
    plain = tensor_bytes(held(folder), {})
    case_file(folder).write_bytes(other(plain))
    with pytest.raises(DamagedGolden, match=f"{case_file(folder).name} is damaged: "):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_an_entry_without_what_a_result_needs_is_found(folder, inputs):
    manifest = GoldenImplementation(NAME, SUITES).manifest
    (entry,) = manifest.entries
    rewrite(folder, lse=None)
    fewer = {name: of for name, of in entry.tensors.items() if name != "lse"}
    entries = (dataclasses.replace(entry, tensors=fewer),)
    write_manifest(folder, dataclasses.replace(manifest, entries=entries))
    with pytest.raises(DamagedGolden, match="a result has lse, max_logits, out, out_rows"):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_results_of_a_suite_that_is_not_recorded_are_named(folder, inputs):
    manifest = GoldenImplementation(NAME, SUITES).manifest
    write_manifest(folder, dataclasses.replace(manifest, suite="decode-plan"))
    with pytest.raises(DamagedGolden, match=r"has results of decode-plan; this version reads"):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_a_case_is_written_to_the_same_bytes_again(folder):
    assert pack(held(folder), LINE) == case_file(folder).read_bytes()


def test_a_missing_file_is_found(folder, inputs):
    case_file(folder).unlink()
    with pytest.raises(DamagedGolden, match="there is no such file"):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_an_entry_that_was_changed_by_hand_is_found(folder, inputs):
    manifest = folder / "manifest.json"
    words = json.loads(manifest.read_text())
    words["entries"][0]["gpu"] = "another"
    manifest.write_text(json.dumps(words))
    golden = GoldenImplementation(NAME, SUITES)
    assert golden.supports(parse_case(LINE)) is None  # it isn't passed over as unsupported
    with pytest.raises(DamagedGolden, match=r"manifest\.json is damaged: its content has the seal"):
        golden.run(inputs)


def _without_an_entry(words: dict) -> None:
    del words["entries"][1]


def _with_one_twice(words: dict) -> None:
    words["entries"].append(words["entries"][0])


def _of_another_source(words: dict) -> None:
    words["source"] = "another kernel"


def _renamed(words: dict) -> None:
    words["name"] = "h100/flash_mla"


@pytest.mark.parametrize(
    "change", [_without_an_entry, _with_one_twice, _of_another_source, _renamed]
)
def test_a_manifest_that_lost_an_entry_or_was_edited_in_its_head_is_found(
    folder, change: Callable[[dict], None]
):
    plans = "engine/vllm-0.33.0"
    shipped = GoldenImplementation(plans, SUITES).manifest
    some = dataclasses.replace(shipped, entries=shipped.entries[:3])
    own = folder.parents[1] / plans
    write_manifest(own, some)
    assert golden_cases(plans) == tuple(entry.case for entry in some.entries)
    words = json.loads((own / "manifest.json").read_text())
    change(words)
    (own / "manifest.json").write_text(json.dumps(words))
    with pytest.raises(DamagedGolden, match="an entry was changed, lost or added"):
        golden_cases(plans)


def test_a_manifest_without_its_seal_is_found(folder):
    words = json.loads((folder / "manifest.json").read_text())
    del words["seal"]
    (folder / "manifest.json").write_text(json.dumps(words))
    with pytest.raises(DamagedGolden, match="KeyError: 'seal'"):
        golden_cases(NAME)


def test_a_folder_whose_manifest_is_missing_is_named_and_not_passed_over(folder, inputs):
    (folder / "manifest.json").unlink()
    assert NAME in available()
    golden = GoldenImplementation(NAME, SUITES)
    assert golden.supports(parse_case(LINE)) is None
    with pytest.raises(DamagedGolden, match=r"manifest\.json can't be read .*No such file"):
        golden.run(inputs)
    report = compare.check("torch", reference=golden.name, cases=[LINE])
    assert report.exit_status == 3 and str(folder) in report.unavailable[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 9, "entries": []}'])
def test_a_manifest_that_is_none_is_found(folder, inputs, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedGolden, match=r"manifest\.json (can't be read|has format [19])"):
        GoldenImplementation(NAME, SUITES).run(inputs)
    with pytest.raises(DamagedGolden):
        golden_cases(NAME)


@pytest.mark.parametrize("name", ["q", "kv", "indices", "attn_sink"])
def test_other_inputs_are_found(folder, inputs, name):
    changed = np.array(getattr(inputs, name))
    changed.view(np.uint8).reshape(-1)[0] ^= 1
    with pytest.raises(DamagedGolden, match="it isn't the same case"):
        GoldenImplementation(NAME, SUITES).run(dataclasses.replace(inputs, **{name: changed}))


def test_another_generator_is_found(folder, inputs, monkeypatch):
    monkeypatch.setattr(streams, "GENERATOR_VERSION", "next")
    with pytest.raises(DamagedGolden, match="and this one has version next: record the case again"):
        GoldenImplementation(NAME, SUITES).run(inputs)


def test_a_case_that_was_not_recorded_is_unsupported_with_the_reason(folder, inputs):
    other: Case = parse_case("sparse-prefill:s_q=1,h=4")
    golden = GoldenImplementation(NAME, SUITES)
    reason = golden.supports(other)
    assert reason == "no result of this case is recorded in cpu/eager"
    with pytest.raises(Unsupported, match="is recorded in cpu/eager"):
        golden.run(make_inputs(other))
    with pytest.raises(Unsupported, match="these inputs"):
        golden.run(dataclasses.replace(inputs, case=None))


def test_an_unknown_name_says_which_there_are(folder):
    with pytest.raises(UnknownGolden, match="recorded for: cpu/eager"):
        GoldenImplementation("h100/flash_mla", SUITES)


def test_golden_cases_are_the_lines_of_the_manifest(folder):
    assert golden_cases(NAME) == (LINE,)


def test_results_of_one_s_own_leave_the_shipped_ones_in_place(folder):
    plans = "engine/vllm-0.33.0"
    names = available()
    assert NAME in names
    assert plans in names
    assert registry.default_reference("prefill-plan") == f"golden:{plans}"
    cases = golden_cases(plans)
    assert len(cases) == 200
    assert [str(case) for case in default_cases("prefill-plan")] == list(cases)


def test_one_s_own_folder_goes_before_one_of_the_same_name(folder):
    plans = "engine/vllm-0.33.0"
    shipped = GoldenImplementation(plans, SUITES).manifest
    some = dataclasses.replace(shipped, entries=shipped.entries[:2])
    write_manifest(folder.parents[1] / plans, some)
    assert golden_cases(plans) == tuple(entry.case for entry in some.entries)
    assert available().count(plans) == 1
