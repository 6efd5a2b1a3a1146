from __future__ import annotations

from pathlib import Path

import pytest

from compare.commands.record import _folder_name
from compare.goldens import files
from compare.recording import record
from compare.recording import record as golden_record
from compare.run import registry
from tests.compare.cli.command_line import command_line

CASE = "sparse-prefill:s_q=2,s_kv=96,h=4"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MLA_CROSSCHECK_GOLDENS", str(tmp_path))
    return tmp_path / "cpu" / "torch"


@pytest.fixture
def clean_tree(monkeypatch):
    monkeypatch.setattr(golden_record, "code_revision", lambda *a, **k: "0123456789ab")


@pytest.mark.usefixtures("clean_tree")
def test_what_is_recorded_can_be_compared_with(folder):
    words = ["record", CASE, "--kernel", "torch", "--out", str(folder)]
    found = command_line(*words)
    assert (found.status, found.out) == (0, f"{folder}: 1 recorded, 0 kept as they were\n")
    assert files.golden_cases("cpu/torch") == (CASE,)
    assert command_line(*words).out == f"{folder}: 0 recorded, 1 kept as they were\n"

    words = ["run", CASE, "--candidate", "torch", "--reference", "golden:cpu/torch"]
    found = command_line(*words)
    assert found.status == 0, found.out
    assert "sparse-prefill against golden:cpu/torch" in found.out.splitlines()

    # A case that was asked about and isn't recorded is judged by the oracle alone, and said.
    found = command_line(words[0], "sparse-prefill:s_q=1,s_kv=96,h=4", *words[2:])
    assert found.status == 3
    assert "The reference failed in 1 case: no result of this case is recorded" in found.out


@pytest.mark.usefixtures("clean_tree")
def test_a_damaged_recording_is_3_and_a_sentence(folder):
    command_line("record", CASE, "--kernel", "torch", "--out", str(folder))
    (file,) = folder.glob("*.safetensors.gz")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = command_line("run", CASE, "--candidate", "torch", "--reference", "golden:cpu/torch")
    assert found.status == 3
    assert f"{file} is damaged" in found.out
    assert "Traceback" not in found.out + found.err


def test_a_dirty_tree_is_refused(folder, monkeypatch):
    def dirty(*args, **kwargs):
        raise record.RecordingRefused("the tree differs from its commit in a.py")

    monkeypatch.setattr(golden_record, "code_revision", dirty)
    found = command_line("record", CASE, "--kernel", "torch", "--out", str(folder))
    assert found.status == 1
    assert found.err == "mla-crosscheck: the tree differs from its commit in a.py\n"


@pytest.mark.usefixtures("clean_tree")
def test_a_kernel_that_is_not_here_is_3(folder):
    if (reason := registry.reason("flash_mla")) is None:
        pytest.skip("FlashMLA runs here")
    found = command_line("record", CASE, "--out", str(folder))
    assert found.status == 3
    assert f"flash_mla can't run here: {reason}" in found.err


def test_an_unknown_kernel_is_2_with_the_nearest(folder):
    found = command_line("record", CASE, "--kernel", "torsh", "--out", str(folder))
    assert (found.status, found.out) == (2, "")
    assert "the nearest is 'torch'" in found.err


DECODE = "dcp-decode:lens=37+5,q=3+1,h=2,world=2"


@pytest.mark.usefixtures("clean_tree")
def test_decode_is_recorded_and_what_a_kernel_does_not_serve_is_skipped_and_said(tmp_path, folder):
    decode = folder.parent / "xla_decode"
    words = [f"{DECODE},rank=all,seed=4", f"{DECODE},rank=1", f"{DECODE},page=16"]
    found = command_line("record", *words, "--kernel", "xla", "--out", str(decode))
    assert found.status == 0, found.err
    assert found.out == f"{decode}: 2 recorded, 0 kept as they were, 1 skipped\n"
    assert "3/3 skipped dcp-decode:lens=37+5,q=3+1,h=2,page=16,world=2: page = 16" in found.err

    words = [*words[:2], "--candidate", "torch", "--reference", "golden:cpu/xla_decode"]
    found = command_line("run", *words)
    assert found.status == 0, found.out
    assert "dcp-decode against golden:cpu/xla_decode" in found.out.splitlines()


@pytest.mark.parametrize(
    ("kernel", "suite", "name"),
    [
        ("flash_mla", "sparse-prefill", "flash_mla"),
        ("flash_mla", "dcp-decode", "flash_mla_decode"),
        ("flashinfer-fa3", "dcp-decode", "flashinfer_fa3"),
        ("flash_mla", "v4-prefill", "flash_mla_v4"),
        ("flash_mla-fp8", "v4-prefill", "flash_mla_fp8"),
        ("vllm", "v4-stages", "vllm_stages"),
    ],
)
def test_each_kernel_and_suite_has_a_folder_of_its_own(kernel, suite, name):
    assert _folder_name(kernel, {suite}) == name


def test_a_function_s_results_need_a_folder_s_name():
    found = command_line("record", CASE, "--kernel", "mine.py:attend")
    assert (found.status, found.out) == (2, "")
    assert "--out says in which folder" in found.err
