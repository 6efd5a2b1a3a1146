"""Commands with the real runner, judge and implementations, on cases of a few rows."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from compare.bundle.bundle import save_bundle
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.report.json import load
from compare.run import registry
from compare.suites.table import make_inputs, parse_case
from tests.compare.cli.command_line import Outcome, command_line

CASE = "sparse-prefill:s_q=2,s_kv=96,h=4"
ROOT = Path(__file__).parents[3]

CANDIDATES = """
import os, time
import numpy as np
import compare

@compare.candidate(framework="numpy")
def raises(q, **rest):
    raise ValueError("indices: shape [2, 128]; [bold]accepted: [2, 1, 128][/bold]")

@compare.candidate(framework="numpy")
def declines(q, **rest):
    raise NotImplementedError("only 64 heads")

@compare.candidate(framework="numpy")
def dies(q, **rest):
    os._exit(17)

@compare.candidate(framework="numpy")
def waits(q, indices, **rest):
    first = os.environ["STARTED"] + ".first"
    if len(q) == 2:
        open(first, "w").close()
        raise ValueError("the first case is over at once")
    while not os.path.exists(first):  # with two jobs the cases run side by side
        time.sleep(0.05)
    with open(os.environ["STARTED"] + "~", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.environ["STARTED"])
    time.sleep(600)
"""


@pytest.fixture
def candidates(tmp_path) -> Path:
    file = tmp_path / "candidates.py"
    file.write_text(CANDIDATES)
    return file


def test_a_right_candidate_passes_and_the_table_shows_the_distances():
    found = command_line("run", CASE, "--candidate", "torch", "--reference", "oracle", "-v")
    assert found.status == 0, found.out
    lines = found.out.splitlines()
    assert "sparse-prefill against oracle" in lines
    (row,) = [line for line in lines if line.endswith(f"  {CASE}")]
    assert row.split()[:2] == ["PASS", "torch"]
    assert lines[-1] == "torch agreed in 1 compared case (exit status 0)."


def test_another_implementation_can_be_the_reference(tmp_path):
    words = ["--candidate", "xla", "--reference", "torch", "--report", "json", "--out"]
    found = command_line("run", CASE, *words, str(tmp_path))
    assert found.status == 0, found.out
    (row,) = load((tmp_path / "report.json").read_text()).rows
    assert row.reference == "torch"
    assert row.verdict.against_reference["out"].elements == 2 * 4 * 512
    assert 0 < row.verdict.torch_against_oracle["out"].rel_l2 < 4e-3


def test_what_a_candidate_raises_is_its_error_and_no_traceback(candidates):
    found = command_line("run", CASE, "--candidate", f"{candidates}:raises")
    assert found.status == 1
    assert "ValueError: indices: shape [2, 128]; [bold]accepted: [2, 1, 128][/bold]" in found.out
    assert f"ERROR {candidates}:raises {CASE}" in found.out
    assert "Traceback" not in found.out + found.err


def test_a_candidate_that_declines_everything_compares_nothing(candidates):
    found = command_line("run", CASE, "--candidate", f"{candidates}:declines")
    assert found.status == 3
    assert f"UNSUPPORTED {candidates}:declines, 1 case: only 64 heads" in found.out


def test_a_candidate_whose_process_dies_costs_its_case_only(candidates):
    words = ["--candidate", f"{candidates}:dies", "--candidate", "torch", "--reference", "oracle"]
    found = command_line("run", CASE, *words)
    assert found.status == 1
    assert f"CRASH {candidates}:dies {CASE}" in found.out
    assert "exit status 17" in found.out
    assert any(line.split()[:4] == ["torch", "1", "0", "0"] for line in found.out.splitlines())


def test_a_function_that_is_not_there_is_2(candidates):
    found = command_line("run", CASE, "--candidate", f"{candidates}:raise")
    assert found.status == 2
    assert "the nearest is 'raises'" in found.err


def test_what_is_asked_for_by_name_and_cannot_run_is_3():
    if (reason := registry.reason("flash_mla")) is None:
        pytest.skip("FlashMLA runs here")
    words = ["--candidate", "torch", "--candidate", "flash_mla", "--reference", "oracle"]
    found = command_line("run", CASE, *words)
    assert found.status == 3
    assert f"flash_mla: {reason}" in found.out
    assert found.out.splitlines()[-1] == "torch agreed in 1 compared case (exit status 3)."


def test_a_reference_that_serves_none_of_the_suites_is_3():
    found = command_line("run", CASE, "--candidate", "torch", "--reference", "vllm-0.33.0")
    assert found.status == 3
    assert "vllm-0.33.0: the reference isn't for sparse-prefill" in found.out


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def interrupted(words: list[str], tmp_path: Path, send: Callable[[int], None]) -> Outcome:
    """`run` with a report, ended by `send` once a candidate has written $STARTED."""
    started = tmp_path / "started"
    report = ["--report", "json,junit", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "compare", "run", *words, *report],
        cwd=ROOT,
        env={**os.environ, "STARTED": str(started)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not started.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        send(process.pid)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return Outcome(process.returncode, out, err)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_a_signal_leaves_the_report_of_what_was_finished(candidates, tmp_path, signals, jobs):
    def send(process: int) -> None:
        if jobs > 1:
            time.sleep(1)  # the other job's row is on its way
        for number in signals:
            os.kill(process, number)

    waiting = "sparse-prefill:s_q=3,s_kv=96,h=4"
    words = [CASE, waiting, "--candidate", f"{candidates}:waits", "--reference", "oracle"]
    found = interrupted([*words, "--jobs", str(jobs)], tmp_path, send)
    assert found.status == 1, found.out + found.err  # what was finished had failed
    report = load((tmp_path / "out/report.json").read_text())
    assert report.interrupted
    assert [row.case for row in report.rows] == [CASE]
    assert "The run was interrupted; the report holds what was finished." in found.out
    assert "Traceback" not in found.out + found.err
    names = [case.get("name") for case in ET.parse(tmp_path / "out/junit.xml").iter("testcase")]
    assert names == [CASE, "The run was interrupted; the report holds what was finished."]
    worker = int((tmp_path / "started").read_text())
    deadline = time.monotonic() + 10  # what a job had started ends by itself, a moment later
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)


def test_a_signal_to_every_process_of_a_run_is_no_crash_of_the_candidate(candidates, tmp_path):
    def send(process: int) -> None:
        os.kill(int((tmp_path / "started").read_text()), signal.SIGTERM)
        os.kill(process, signal.SIGTERM)

    waiting = "sparse-prefill:s_q=3,s_kv=96,h=4"
    words = [CASE, waiting, "--candidate", f"{candidates}:waits", "--reference", "oracle"]
    found = interrupted(words, tmp_path, send)
    report = load((tmp_path / "out/report.json").read_text())
    assert report.interrupted
    assert [row.case for row in report.rows] == [CASE]
    assert "CRASH" not in found.out


def test_a_plan_that_breaks_a_rule_fails_with_its_chunk_named():
    batch = "prefill-plan:seq=40+40+16+64+0,q=0+5+0+3+0,window=8,max_len=64,max_tokens=16,chunk=1"
    words = ["--candidate", "vllm-0.33.0", "--candidate", "jax-planner", "--reference", "oracle"]
    found = command_line("run", batch, *words)
    assert found.status == 1
    assert "P1: chunk 0 (request 0) has no query token" in found.out
    assert f"PLAN vllm-0.33.0 {batch}" in found.out
    assert "PLAN jax-planner" not in found.out


def test_a_bundle_of_one_s_own_is_judged(tmp_path):
    inputs = make_inputs(parse_case(CASE))
    assert isinstance(inputs, SparsePrefillInputs)
    right = registry.find("torch").run(inputs)
    assert isinstance(right, SparsePrefillResult)
    wrong = dataclasses.replace(right, lse=(right.lse / np.log(2)).astype(np.float32))
    mine, theirs = tmp_path / "mine.safetensors", tmp_path / "theirs.safetensors"
    save_bundle(mine, inputs, right)
    save_bundle(theirs, inputs, wrong)

    words = ["--report", "json", "--out", str(tmp_path)]
    assert command_line("compare", str(mine), *words).status == 0
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["rows"][0]["candidate"] == str(mine)

    found = command_line("compare", str(theirs), str(mine))
    assert found.status == 1
    assert "diagnosis lse-base-2" in found.out

    # The other way round the reference is what fails, and the candidate passes beside the oracle.
    found = command_line("compare", str(mine), str(theirs))
    assert found.status == 3
    assert "The reference failed in 1 case" in found.out

    mine.write_bytes(b"not a bundle")
    found = command_line("compare", str(mine))
    assert (found.status, found.out) == (2, "")
    assert str(mine) in found.err
