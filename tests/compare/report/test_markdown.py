from __future__ import annotations

import re

import pytest

from compare.protocol.report import Row
from compare.protocol.verdict import Status, Verdict
from compare.report import files
from compare.report.markdown import render
from compare.report.table import CASE_COLUMNS, SUMMARY_COLUMNS
from tests.compare.report.fabricated import BASE_2, EVERYTHING, RAISED, UNSUPPORTED, report, row


def test_the_headline_names_who_failed_and_the_exit_status():
    assert render(report(row())).startswith(
        "# mla-crosscheck: xla agreed in 1 compared case (exit status 0)."
    )
    assert render(report(row(), row(Status.SPECIAL, candidate="torch"))).startswith(
        "# mla-crosscheck: torch failed in 1 of 1 compared case (exit status 1)."
    )
    assert render(report()).startswith("# mla-crosscheck: Nothing was compared (exit status 3).")


def test_a_failure_shows_diagnosis_worst_place_and_reproducer():
    text = render(report(BASE_2))
    assert "diagnosis lse-base-2: lse is 1.4427 times the oracle's: base 2" in text
    assert "worst lse[2, 17]: got 6.7, expected 4.644, 3.1e+05 times" in text
    assert (
        "reproduce: python -m compare run sparse-prefill:s_q=3,s_kv=300,seed=7 --candidate "
        "'my|kernels.py:attend' --reference golden:h200/flash_mla" in text
    )


PLAN = Row(
    case="prefill-plan:seq=4,q=2",
    candidate="jax-planner",
    reference=None,
    verdict=Verdict(status=Status.PASS),
    seconds=0.1,
)


@pytest.mark.parametrize(
    "made",
    [report(PLAN), report(row()), report(), EVERYTHING],
    ids=["no-legend", "legend", "no-rows", "everything"],
)
def test_blocks_stand_one_blank_line_apart(made):
    lines = render(made).splitlines()
    assert not [i for i in range(len(lines) - 1) if not lines[i] and not lines[i + 1]]
    for i, line in enumerate(lines[1:], 1):
        if line.startswith(("#", "<details>", "</details>")):
            assert not lines[i - 1], line


def test_one_row_is_not_all_of_several():
    assert "<summary>1 row</summary>" in render(report(PLAN))
    assert "<summary>All 2 rows</summary>" in render(report(PLAN, row()))


def test_a_bar_in_a_name_opens_no_column():
    lines = _table_lines(render(report(BASE_2, row())))
    assert len(lines) == 8  # two tables with a heading, a rule and two lines each
    for line in lines:
        columns = len(re.findall(r"(?<!\\)\|", line)) - 1
        assert columns in (len(SUMMARY_COLUMNS), len(CASE_COLUMNS)), line


def test_nothing_that_a_candidate_says_ends_the_fence_or_becomes_html():
    text = render(report(RAISED, row(Status.UNSUPPORTED, reason="<b>no</b>\n# not a title")))
    assert text.count("~~~~") == 2
    assert "<b>" not in text
    assert "\n# not a title" not in text


def test_reasons_for_not_comparing_are_grouped():
    rows = [row(Status.UNSUPPORTED, case=f"sparse-prefill:seed={i}", reason="no") for i in range(7)]
    text = render(report(row(), UNSUPPORTED, *rows))
    assert "- xla, 7 cases: no" in text
    assert "- pallas, 1 case: needs a Hopper GPU; there is none here" in text


def test_what_is_wrong_with_the_run_is_said():
    text = render(EVERYTHING)
    assert "- flash\\_mla isn't available: no GPU" in text
    assert "- The run was interrupted" in text
    assert "compared and --require asks for 40." in text
    assert "- The reference failed in 1 case: golden:h200/flash\\_mla is outside its bound" in text
    assert "--profile both" in text


def test_long_reports_say_what_they_leave_out():
    text = render(
        report(*[row(Status.NUMERIC, case=f"sparse-prefill:seed={i}") for i in range(612)])
    )
    assert "562 more failures are in the JSON report and not shown here." in text
    assert "112 more rows are in the JSON report and not shown here." in text
    assert len(text.encode()) < 2**20


def test_the_job_summary_of_a_workflow_is_appended_to(tmp_path, monkeypatch):
    job_summary = tmp_path / "summary.md"
    job_summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(job_summary))
    written = files.write(EVERYTHING, ["json", "md"], tmp_path / "out")
    assert written == (tmp_path / "out/report.json", tmp_path / "out/report.md", job_summary)
    text = job_summary.read_text(encoding="utf-8")
    assert text.startswith("before\n# mla-crosscheck:")

    files.write(EVERYTHING, ["json", "junit"], tmp_path / "out")
    assert job_summary.read_text(encoding="utf-8") == text


def test_without_a_workflow_only_the_folder_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    files.write(EVERYTHING, files.FORMATS, tmp_path / "out")
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {
        "report.json",
        "junit.xml",
        "report.md",
    }


def _table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]
