"""Recording: what is written, what is refused, and what an interruption leaves."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest

import compare.judging.attention
from compare.goldens.format import DamagedGolden, array_sha256, read_manifest
from compare.goldens.implementation import GoldenImplementation
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.verdict import Status, Verdict
from compare.recording import record as golden_record
from compare.recording.record import KernelNotAvailable, RecordingRefused, code_revision, record
from compare.run import registry
from compare.suites.sparse_prefill.recorded import SparsePrefillRecords
from compare.suites.table import SUITES, make_inputs, parse_case

PLAIN = "sparse-prefill:s_q=2,s_kv=100,h=8,topk=64,sink=mixed,length=ragged,empty_rows=1,seed=1"
WIDE = "sparse-prefill:s_kv=90,h=4,d=576,topk=70,data=flat,invalid=0.3,seed=2"
BATCH = "sparse-prefill:s_kv=100,h=4,topk=64,q_lens=0+2+0+1,plan=fixed,seed=3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """goldens/cpu/eager, and the folder of recorded results is goldens."""
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    return tmp_path / "cpu" / "eager"


def test_a_recording_comes_back_as_it_was(eager, folder, clean_tree):
    lines = []
    done = record(eager(), [PLAIN, WIDE], folder, progress=lines.append)
    assert done.recorded == (PLAIN, WIDE)
    assert len(lines) == 2
    golden = GoldenImplementation("cpu/eager", SUITES)
    assert golden.name == "golden:cpu/eager"
    assert golden.suites == {"sparse-prefill"}
    for line in (PLAIN, WIDE):
        case = parse_case(line)
        inputs = make_inputs(case)
        assert golden.supports(case) is None
        whole, kept = eager().run(inputs), golden.run(inputs)
        assert isinstance(kept, SparsePrefillResult)
        assert kept.max_logits is not None and kept.out_rows is not None
        assert kept.lse.tobytes() == whole.lse.tobytes()
        assert kept.max_logits.tobytes() == whole.max_logits.tobytes()
        assert kept.out.dtype == whole.out.dtype
        rows = whole.out.reshape(-1, 512)[kept.out_rows]
        assert kept.out.tobytes() == rows.tobytes()
        assert kept.notes[0].startswith("recorded on ")


def test_the_manifest_says_what_was_recorded_from_what(eager, folder, clean_tree):
    record(eager(), [PLAIN], folder)
    manifest = read_manifest(folder)
    (entry,) = manifest.entries
    inputs = make_inputs(parse_case(PLAIN))
    assert manifest.name == "cpu/eager"
    assert entry.case == PLAIN
    assert entry.revision == clean_tree
    assert entry.input_sha256 == inputs.sha256()
    assert entry.facts["out_sha256"] == array_sha256(eager().run(inputs).out)
    assert entry.facts["rows"] == {"kept": 16, "special": entry.facts["rows"]["special"], "of": 16}
    assert entry.tensors["lse"].shape == (2, 8)
    assert entry.tensors["out"].dtype == "bfloat16"


def test_a_batch_that_runs_chunk_by_chunk_is_answered_whole(eager, folder, clean_tree):
    inputs = make_inputs(parse_case(BATCH))
    assert isinstance(inputs, SparsePrefillInputs)
    assert inputs.chunks == ((0, 2), (2, 3))
    record(eager(), [BATCH], folder)
    result = GoldenImplementation("cpu/eager", SUITES).run(inputs)
    assert isinstance(result, SparsePrefillResult)
    assert result.lse.tobytes() == eager().run(inputs).lse.tobytes()
    assert result.lse.shape == (3, 4)


def test_what_is_recorded_already_is_kept(eager, folder, clean_tree):
    record(eager(), [PLAIN], folder)
    again = eager()
    done = record(again, [PLAIN, WIDE], folder)
    assert done.kept == (PLAIN,)
    assert done.recorded == (WIDE,)
    assert again.ran == [WIDE]
    assert record(again, [PLAIN], folder, force=True).recorded == (PLAIN,)


def test_another_build_is_recorded_anew(eager, folder, clean_tree, monkeypatch):
    record(eager(), [PLAIN], folder)
    monkeypatch.setattr(golden_record, "_build", lambda *_: {"name": "eager", "version": "next"})
    assert record(eager(), [PLAIN], folder).recorded == (PLAIN,)
    (entry,) = read_manifest(folder).entries
    assert entry.build is not None and entry.build["version"] == "next"


def test_a_result_that_the_judge_refuses_is_not_recorded_and_the_others_are(
    eager, folder, clean_tree
):
    def base_two_for_eight_heads(result):
        factor = np.float32(1.4427 if result.lse.shape[1] == 8 else 1)
        return dataclasses.replace(result, lse=result.lse * factor)

    with pytest.raises(RecordingRefused, match="the judge says") as refusal:
        record(eager(base_two_for_eight_heads), [PLAIN, WIDE], folder)
    assert PLAIN in str(refusal.value)
    assert refusal.value.recording.recorded == (WIDE,)
    assert [entry.case for entry in read_manifest(folder).entries] == [WIDE]


@pytest.mark.parametrize(
    ("data", "profile"), [("flashmla", "both"), ("normal", "calibrated"), ("exact", "calibrated")]
)
def test_tolerances_of_flash_mla_hold_for_its_own_data(
    eager, folder, clean_tree, monkeypatch, data, profile
):
    asked = []

    def judge(inputs, result, reference, *, profile, evidence):
        asked.append(profile)
        return Verdict(status=Status.PASS)

    monkeypatch.setattr(compare.judging.attention, "judge", judge)
    record(eager(), [f"sparse-prefill:h=4,topk=64,data={data}"], folder)
    assert asked == [profile]


def test_a_case_that_raises_is_listed_with_its_message(eager, folder, clean_tree):
    def fail(result):
        raise RuntimeError("the descriptor can't be encoded")

    with pytest.raises(RecordingRefused, match="RuntimeError: the descriptor can't be encoded"):
        record(eager(fail), [PLAIN], folder)
    assert not folder.exists()


def test_an_interrupted_recording_keeps_what_was_finished(eager, folder, clean_tree):
    def interrupt(result):
        if result.lse.shape[1] == 4:
            raise KeyboardInterrupt
        return result

    with pytest.raises(KeyboardInterrupt):
        record(eager(interrupt), [PLAIN, WIDE], folder)
    assert [entry.case for entry in read_manifest(folder).entries] == [PLAIN]
    GoldenImplementation("cpu/eager", SUITES).run(make_inputs(parse_case(PLAIN)))
    assert record(eager(), [PLAIN, WIDE], folder).kept == (PLAIN,)


def test_a_folder_stays_under_its_size(eager, folder, clean_tree, monkeypatch):
    monkeypatch.setattr(SparsePrefillRecords, "largest_folder", 10_000)
    with pytest.raises(RecordingRefused, match="larger than 10,000 in all") as refusal:
        record(eager(), [PLAIN, WIDE], folder)
    assert refusal.value.recording.recorded == (PLAIN,)


def test_a_case_stays_under_its_size(eager, folder, clean_tree, monkeypatch):
    monkeypatch.setattr(golden_record, "LARGEST_CASE", 5_000)
    with pytest.raises(RecordingRefused, match="exceed the 5,000 that a case may have"):
        record(eager(), [PLAIN], folder)


def test_a_damaged_manifest_is_not_overwritten(eager, folder, clean_tree):
    record(eager(), [PLAIN], folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DamagedGolden, match="can't be read as a manifest"):
        record(eager(), [WIDE], folder)


def test_a_kernel_that_cannot_run_here_is_refused_with_the_reason(folder, clean_tree, monkeypatch):
    monkeypatch.setattr(registry, "reason", lambda name, device: "torch sees no GPU")
    with pytest.raises(KernelNotAvailable, match="flash_mla can't run here: torch sees no GPU"):
        record("flash_mla", [PLAIN], folder)


def test_an_implementation_is_found_by_its_name(folder, clean_tree):
    assert record("torch", [WIDE], folder, device="cpu").recorded == (WIDE,)
    (entry,) = read_manifest(folder).entries
    assert entry.build is not None and entry.build["name"] == "torch"


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "-q")
    (root / "kernel.py").write_text("a = 1\n")
    git(root, "add", "kernel.py")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_a_clean_tree_gives_its_commit(checkout):
    assert len(code_revision(checkout / "goldens", root=checkout)) == 40


@pytest.mark.parametrize("name", ["kernel.py", "new file.py"])
def test_a_dirty_tree_is_refused_and_says_which_files(checkout, name):
    (checkout / name).write_text("a = 2\n")
    with pytest.raises(RecordingRefused, match=f"differs from its commit in {name}:"):
        code_revision(checkout / "goldens", root=checkout)
    assert code_revision(checkout / "goldens", root=checkout, allow_dirty=True).endswith("-dirty")


def test_what_is_being_recorded_makes_no_tree_dirty(checkout):
    out = checkout / "goldens" / "h200" / "flash_mla"
    out.mkdir(parents=True)
    (out / "manifest.json").write_text("{}")
    assert not code_revision(out, root=checkout).endswith("-dirty")


def test_without_git_the_revision_must_be_given(tmp_path, monkeypatch):
    monkeypatch.delenv("MLA_CROSSCHECK_REVISION", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(RecordingRefused, match="set MLA_CROSSCHECK_REVISION"):
        code_revision(tmp_path / "out", root=tmp_path)
    monkeypatch.setenv("MLA_CROSSCHECK_REVISION", "0123abc")
    revision = code_revision(tmp_path / "out", root=tmp_path)
    assert revision == "0123abc (as given by MLA_CROSSCHECK_REVISION)"


def test_a_dirty_tree_is_refused_before_anything_runs(eager, tmp_path, monkeypatch):
    def dirty(*_, **__):
        raise RecordingRefused("the tree differs from its commit in kernel.py")

    monkeypatch.setattr(golden_record, "code_revision", dirty)
    kernel = eager()
    with pytest.raises(RecordingRefused, match=r"kernel\.py"):
        record(kernel, [PLAIN], tmp_path / "cpu" / "eager")
    assert kernel.ran == []
