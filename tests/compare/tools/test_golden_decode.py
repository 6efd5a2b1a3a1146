"""Results of decode: recorded, read back, and refused where they aren't what they were."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from compare.goldens.format import DamagedGolden, array_sha256, read_manifest
from compare.goldens.implementation import GoldenImplementation
from compare.protocol.case import Case
from compare.protocol.inputs import Inputs
from compare.recording.record import RecordingRefused, record
from compare.run import registry
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.dcp_decode.recorded import DcpDecodeRecords
from compare.suites.table import SUITES, default_cases, make_inputs, parse_case

RANK = "dcp-decode:lens=37+5,q=3+2,h=6,world=2,rank=1,pad_rows=2,seed=1"
ALL = "dcp-decode:lens=70+9,q=2+1,h=4,world=4,rank=all,data=flat,seed=2"
RECORDS = DcpDecodeRecords()
PAGE = "dcp-decode:lens=70,q=2,h=4,page=32,seed=3"


class PagesOf64:
    """The eager decode, for pages of 64 alone."""

    name = "eager"
    suites = frozenset({"dcp-decode"})

    def supports(self, case: Case) -> str | None:
        assert isinstance(case, DcpDecodeCase)
        return None if case.page == 64 else f"page = {case.page}: it takes pages of 64 keys"

    def run(self, inputs: Inputs) -> DcpDecodeResult:
        result = registry.in_process("torch", "cpu").run(inputs)
        assert isinstance(result, DcpDecodeResult)
        return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    return tmp_path / "cpu" / "eager_decode"


def inputs_of(line: str) -> DcpDecodeInputs:
    made = make_inputs(parse_case(line))
    assert isinstance(made, DcpDecodeInputs)
    return made


def test_a_recording_comes_back_as_it_was_and_what_is_not_served_is_skipped(folder, clean_tree):
    lines = []
    done = record(PagesOf64(), [RANK, PAGE, ALL], folder, progress=lines.append)
    assert done.recorded == (RANK, ALL)
    assert done.skipped == {PAGE: "page = 32: it takes pages of 64 keys"}
    assert lines[1] == f"2/3 skipped {PAGE}: page = 32: it takes pages of 64 keys"
    golden = GoldenImplementation("cpu/eager_decode", SUITES)
    assert golden.suites == {"dcp-decode"}
    assert golden.supports(parse_case(PAGE)) is not None
    for line in (RANK, ALL):
        whole, kept = PagesOf64().run(inputs_of(line)), golden.run(inputs_of(line))
        assert isinstance(kept, DcpDecodeResult) and kept.out_rows is not None
        assert kept.lse.tobytes() == whole.lse.tobytes()
        assert kept.out.tobytes() == whole.out.reshape(-1, 512)[kept.out_rows].tobytes()
        assert kept.out.dtype.name == "bfloat16"
        assert kept.notes[0].startswith("recorded on ")


def test_the_manifest_is_of_its_suite_and_says_what_was_recorded(folder, clean_tree):
    record(PagesOf64(), [RANK], folder)
    manifest = read_manifest(folder)
    (entry,) = manifest.entries
    assert manifest.suite == "dcp-decode" and entry.facts["parts"] == "float32"
    assert sorted(entry.tensors) == ["lse", "out", "out_rows"]
    assert entry.input_sha256 == inputs_of(RANK).sha256()
    assert entry.facts["out_sha256"] == array_sha256(PagesOf64().run(inputs_of(RANK)).out)
    assert record(PagesOf64(), [RANK], folder).kept == (RANK,)


def test_a_folder_holds_one_suite(folder, clean_tree):
    prefill = "sparse-prefill:h=4,topk=64,s_kv=90"
    with pytest.raises(RecordingRefused, match="a folder has those of one suite"):
        record("torch", [RANK, prefill], folder, device="cpu")
    record(PagesOf64(), [RANK], folder)
    with pytest.raises(RecordingRefused, match="can't hold results of dcp-decode and sparse"):
        record("torch", [prefill], folder, device="cpu")
    with pytest.raises(RecordingRefused, match="can't hold results of decode-plan"):
        record("torch-planner", ["decode-plan:lens=9,q=1"], folder / "plans")


def test_nothing_served_is_a_refusal(folder, clean_tree):
    with pytest.raises(RecordingRefused, match="eager serves none of the cases: page = 32") as no:
        record(PagesOf64(), [PAGE], folder)
    assert list(no.value.recording.skipped) == [PAGE]


def test_a_wrong_result_is_not_recorded(folder, clean_tree):
    class BaseTwo(PagesOf64):
        def run(self, inputs: Inputs) -> DcpDecodeResult:
            result = super().run(inputs)
            return dataclasses.replace(result, lse=result.lse * np.float32(1.4427))

    with pytest.raises(RecordingRefused, match="the judge says"):
        record(BaseTwo(), [RANK], folder)


def test_other_inputs_than_the_recorded_are_damage(folder, clean_tree):
    record(PagesOf64(), [ALL], folder)
    inputs = inputs_of(ALL)
    assert inputs.shards is not None
    inputs.shards[1].q[0, 0, 0] = 1
    with pytest.raises(DamagedGolden, match="it isn't the same case"):
        GoldenImplementation("cpu/eager_decode", SUITES).run(inputs)


def test_padding_rows_without_keys_and_others_without_a_finite_lse_are_special():
    inputs = inputs_of("dcp-decode:lens=1+40,q=3+2,h=2,world=2,rank=1,pad_rows=2")
    lse = np.zeros((7, 2), np.float32)
    lse[4, 1] = np.nan
    lse[0] = -np.inf
    kinds = RECORDS.special_rows(inputs, lse)
    assert {kind: np.flatnonzero(rows.reshape(-1)).tolist() for kind, rows in kinds.items()} == {
        "padding": [10, 11, 12, 13],
        "no key": [0, 1, 2, 3, 4, 5],
        "lse not finite": [9],
    }
    rows, special = RECORDS.choose_rows(inputs, lse, seed=0, budget=12)
    assert special == 11 and len(rows) == 12


def test_a_draft_block_s_tokens_all_see_the_last_key():
    inputs = inputs_of("dcp-decode:lens=2,q=2,h=1,world=2,rank=1,causal=0")
    assert RECORDS.special_rows(inputs, np.zeros((2, 1), np.float32)) == {}
    causal = inputs_of("dcp-decode:lens=2,q=2,h=1,world=2,rank=1")
    assert RECORDS.special_rows(causal, np.zeros((2, 1), np.float32))["no key"].tolist() == [
        [True],
        [False],
    ]


def test_the_default_cases_of_two_kernels_fit_into_four_megabytes():
    cases = [case for case in default_cases("dcp-decode") if isinstance(case, DcpDecodeCase)]
    flash_mla = [c for c in cases if c.page == 64 and c.kv == "bf16" and c.scale > 0]
    flashinfer = [c for c in cases if c.q_dtype == "bf16" and c.scale > 0]
    assert max(map(most_bytes, cases)) < 48_000
    folders = [sum(map(most_bytes, served)) for served in (flash_mla, flashinfer)]
    assert max(folders) < RECORDS.largest_folder
    assert sum(folders) < 4_000_000


def most_bytes(case: DcpDecodeCase) -> int:
    rows = case.tokens * case.h
    return RECORDS.share.rows(rows) * (1024 + 4) + rows * 4 + 1000
