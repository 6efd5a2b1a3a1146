"""`run` with a runner that only notes what it was asked."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from compare.goldens import files
from compare.goldens.format import DamagedGolden
from compare.protocol.verdict import Status
from compare.report.json import load
from compare.run import runner
from compare.suites.table import SUITES, default_cases, full_cases, parse_case
from tests.compare.cli.command_line import command_line
from tests.compare.report.fabricated import BASE_2, CASE, UNSUPPORTED, report, row


class FakeRunner:
    def __init__(self) -> None:
        self.found = report(row())
        self.cases: list[str] = []
        self.asked: dict = {}

    def __call__(self, cases, candidates, reference, options, *, progress):
        self.cases = [str(case) for case in cases]
        self.asked = {"candidates": candidates, "reference": reference, **vars(options)}
        progress(1, 1, "xla")
        return self.found


@pytest.fixture
def fake(monkeypatch) -> FakeRunner:
    made = FakeRunner()
    monkeypatch.setattr(runner, "run", made)
    return made


def test_without_words_every_suite_runs_with_what_fits_this_machine(fake):
    assert command_line("run").status == 0
    expected = [case for suite in SUITES for case in default_cases(suite)]
    assert fake.cases == [str(case) for case in expected]
    assert fake.asked["candidates"] is None
    assert fake.asked["reference"] is None
    assert fake.asked["full"] is False


def test_suites_and_cases_are_taken_in_their_order_and_once(fake):
    line = "sparse-prefill:s_q=7,seed=99"
    command_line("run", line, "prefill-plan", line)
    assert fake.cases == [line, *map(str, default_cases("prefill-plan"))]


def test_full_takes_the_full_matrix(fake):
    command_line("run", "sparse-prefill", "--full")
    assert fake.cases == [str(case) for case in full_cases("sparse-prefill")]
    assert fake.asked["full"] is True


def test_every_option_reaches_the_runner(fake):
    command_line(
        *("run", CASE, "--candidate", "xla", "--candidate", "my.py:attend"),
        *("--reference", "oracle", "--profile", "both", "--jobs", "3", "--timeout", "20"),
        *("--device", "cuda:1", "--repeat", "50"),
    )
    assert fake.asked == {
        "candidates": ["xla", "my.py:attend"],
        "reference": "oracle",
        "profile": "both",
        "jobs": 3,
        "timeout": 20.0,
        "device": "cuda:1",
        "full": False,
        "named": frozenset({parse_case(CASE)}),
        "repeat": 50,
    }


def test_k_keeps_the_cases_whose_line_holds_the_pattern(fake):
    command_line("run", "sparse-prefill", "-k", "d=576*sink=mixed")
    assert fake.cases
    assert all("d=576" in line and "sink=mixed" in line for line in fake.cases)
    everything = [str(case) for case in default_cases("sparse-prefill")]
    assert len(fake.cases) == sum("d=576" in c and "sink=mixed" in c for c in everything)


def test_a_pattern_that_is_nowhere_compares_nothing(fake):
    fake.found = report()
    found = command_line("run", "sparse-prefill", "-k", "no-such-thing")
    assert (found.status, fake.cases) == (3, [])
    assert "-k no-such-thing is in none of the" in found.out
    assert "Nothing was compared" in found.out


@pytest.mark.parametrize(
    ("made", "words", "status"),
    [
        (report(row()), [], 0),
        (report(row()), ["--require", "1"], 0),
        (report(row()), ["--require", "2"], 1),
        (report(row(), BASE_2), [], 1),
        (report(UNSUPPORTED), [], 3),
        (report(UNSUPPORTED), ["--require", "1"], 1),
        (report(row(), unavailable=("pallas: no GPU",)), [], 3),
        (report(row(), interrupted=True), [], 3),
        (report(row(), row(Status.CRASH), interrupted=True), [], 1),
    ],
)
def test_the_exit_status_is_the_report_s(fake, made, words, status):
    fake.found = made
    assert command_line("run", CASE, *words).status == status


def test_a_failure_prints_case_diagnosis_worst_place_and_reproducer(fake):
    fake.found = report(row(), BASE_2)
    out = command_line("run", CASE).out
    for line in (
        f"NUMERIC my|kernels.py:attend {CASE}",
        "  lse: 192 of 192 rows are outside 4 fp32 ulp of the oracle",
        "  diagnosis lse-base-2: lse is 1.4427 times the oracle's: base 2",
        "  worst lse[2, 17]: got 6.7, expected 4.644, 3.1e+05 times what is allowed there",
        f"  reproduce: python -m compare run {CASE} --candidate 'my|kernels.py:attend' "
        "--reference golden:h200/flash_mla",
    ):
        assert line in out.splitlines()


def test_the_files_hold_the_same_run(fake, tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    fake.found = report(row(), BASE_2, UNSUPPORTED)
    folder = tmp_path / "a" / "b"
    found = command_line("run", CASE, "--report", "junit,md", "--report", "json", "--out", folder)
    assert found.status == 1
    assert json.loads((folder / "report.json").read_text())["exit_status"] == 1
    root = ET.parse(folder / "junit.xml").getroot()
    assert [root.get(name) for name in ("tests", "failures", "errors", "skipped")] == list("3101")
    assert "lse-base-2" in (folder / "report.md").read_text()
    for name in ("report.json", "junit.xml", "report.md"):
        assert f"wrote {folder / name}" in found.out


def test_files_that_fail_to_be_written_cost_neither_the_table_nor_a_failing_status(
    fake, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compare.report.files.write", full)
    fake.found = report(row())
    found = command_line("run", "--report", "json", "--out", str(tmp_path))
    assert found.status == 3
    assert "agreed in 1 compared case" in found.out
    assert "can't be written: [Errno 28] No space left on device" in found.err


def test_an_interrupted_run_leaves_its_files(fake, tmp_path):
    fake.found = report(row(), interrupted=True)
    found = command_line("run", CASE, "--report", "json", "--out", str(tmp_path))
    assert found.status == 3
    assert "The run was interrupted; the report holds what was finished." in found.out
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["interrupted"] is True
    assert len(data["rows"]) == 1


def test_a_suite_whose_recorded_cases_are_damaged_is_said_and_the_other_runs(fake, monkeypatch):
    def damaged(name):
        raise DamagedGolden("manifest.json is damaged: its seal is broken")

    monkeypatch.setattr(files, "golden_cases", damaged)
    found = command_line("run")
    assert found.status == 3
    recorded = ("prefill-plan", "v4-stages")
    for suite in recorded:
        assert f"{suite}: manifest.json is damaged: its seal is broken" in found.out
    others = [suite for suite in SUITES if suite not in recorded]
    assert fake.cases == [str(case) for suite in others for case in default_cases(suite)]


def test_without_report_nothing_is_written(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command_line("run", CASE)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_outside_the_run_is_a_line_and_130(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    found = command_line("run", CASE)
    assert found.status == 130
    assert found.err == "mla-crosscheck: interrupted\n"


def test_report_written_by_run_is_the_one_that_ran(fake, tmp_path):
    """What `load` gives back is the report with the require of the command line."""
    fake.found = report(row(), BASE_2)
    words = ["--require", "5", "--report", "json", "--out", str(tmp_path)]
    command_line("run", CASE, *words)
    written = load((tmp_path / "report.json").read_text())
    assert written == report(row(), BASE_2, require=5)
