from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from compare.protocol.verdict import Status
from compare.report import console as terminal
from compare.report.markdown import render
from tests.compare.report.fabricated import BASE_2, EVERYTHING, UNSUPPORTED, report, row


def test_the_summary_has_one_line_for_each_suite_and_candidate():
    rows = [row(case=f"sparse-prefill:seed={i}", share=i / 10) for i in range(5)]
    text = show(report(*rows, row(candidate="torch"), UNSUPPORTED))
    assert "sparse-prefill against golden:h200/flash_mla\n" in text
    lines = [line.split() for line in text.splitlines()]
    # Passed, failed, not applicable; share; rel L2 of candidate, reference and torch; lse.
    assert ["xla", "5", "0", "0", "40.0%", "2.07e-3", "2.08e-3", "2.09e-3", "1.40e-6"] in lines
    assert ["torch", "1", "0", "0", "42.0%", "2.07e-3", "2.08e-3", "2.09e-3", "1.40e-6"] in lines
    assert ["pallas", "0", "0", "1", "-", "-", "-", "-", "-"] in lines


def test_cases_that_no_reference_has_are_counted_in_words():
    rows = [row(case=f"sparse-prefill:seed={i}", reference=None) for i in range(2)]
    found = report(row(), *rows, row(case="dcp-decode:q=1", reference=None), UNSUPPORTED)
    said = (
        "2 of 3 cases of sparse-prefill have no result in golden:h200/flash_mla: judged against "
        "the oracle alone"
    )
    assert show(found).count(said) == 1
    assert said.replace("_", "\\_") in render(found)
    assert "oracle alone" not in show(report(*rows)) + show(report(row()))


def test_a_column_without_any_value_is_left_out():
    plan = row(
        case="prefill-plan:seq=4,q=4",
        share=None,
        against_oracle={},
        reference_against_oracle={},
        torch_against_oracle={},
    )
    lines = show(report(plan)).splitlines()
    assert ["candidate", "pass", "fail", "n/a"] in [line.split() for line in lines]
    assert not [line for line in lines if line.startswith(("bound:", "out", "lse"))]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("legend", [False, True])
def test_parts_stand_one_blank_line_apart(verbose, legend):
    values: dict = {} if legend else {"share": None}
    failed = [
        row(Status.NUMERIC, case=f"sparse-prefill:seed={i}", reason="off", **values)
        for i in range(33)
    ]
    lines = show(report(*failed, UNSUPPORTED, *([row()] if legend else [])), verbose=verbose)
    assert ("bound:" in lines) == legend
    assert "\n\nNUMERIC xla sparse-prefill:seed=0\n" in lines
    assert "\n\nNUMERIC xla sparse-prefill:seed=1\n" in lines
    assert "\n\nUNSUPPORTED pallas" in lines
    assert "\n\n\n" not in lines


def test_that_nothing_was_compared_is_said_once():
    assert show(report()).count("othing was compared") == 1
    text = show(report(UNSUPPORTED, require=3))
    assert text.splitlines()[-2:] == [
        "0 cases were compared and --require asks for 3.",
        "Nothing was compared (exit status 1).",
    ]


def test_the_summary_fits_80_columns():
    text = show(report(row(candidate="pallas-interpret"), row(candidate="xla")), width=60)
    lines = [line.rstrip() for line in text.split("bound: ")[0].splitlines()[1:]]
    assert max(map(len, lines)) <= 80
    assert any("pallas-interpret" in line and "1.40e-6" in line for line in lines)


def test_the_worst_of_a_group_counts_nan_as_the_worst():
    rows = [row(case="sparse-prefill:seed=1", share=float("nan")), row(share=0.9)]
    assert "nan" in show(report(*rows))


def test_a_failure_says_everything_unwrapped_even_on_a_narrow_terminal():
    long_case = "sparse-prefill:" + ",".join(f"key{i}=value{i}" for i in range(30))
    failed = row(Status.NUMERIC, case=long_case, reason="out: too far", worst=BASE_2.verdict.worst)
    text = show(report(failed, BASE_2), width=60)
    assert f"NUMERIC xla {long_case}\n" in text
    assert "  diagnosis lse-base-2: lse is 1.4427 times the oracle's: base 2\n" in text
    assert (
        "  worst lse[2, 17]: got 6.7, expected 4.644, 3.1e+05 times what is allowed there\n" in text
    )
    assert (
        f"  reproduce: python -m compare run {long_case} --candidate xla --reference "
        "golden:h200/flash_mla\n" in text
    )


def test_text_in_brackets_is_not_taken_for_markup():
    reason = "indices: shape [3, 128]; [red]not markup[/red]"
    assert reason in show(report(row(Status.ERROR, reason=reason)))


def test_many_failures_are_counted_and_verbose_shows_all():
    made = report(*[row(Status.NUMERIC, case=f"sparse-prefill:seed={i}") for i in range(33)])
    text = show(made)
    assert "13 more failures: --verbose or --report json has them" in text
    assert text.count("reproduce:") == 20
    assert show(made, verbose=True).count("reproduce:") == 33


def test_verbose_adds_a_line_for_each_case():
    made = report(row(), row(Status.SHAPE, candidate="torch"))
    assert show(made).count("sparse-prefill:s_q=3") == 2  # the failure's two lines
    assert show(made, verbose=True).count("sparse-prefill:s_q=3") == 4


def test_verbose_ends_with_the_slowest_of_many_rows():
    rows = [
        dataclasses.replace(row(case=f"sparse-prefill:seed={i}"), seconds=float(i))
        for i in range(12)
    ]
    heading = "The slowest calls, compilation included"
    lines = show(report(*rows), verbose=True).splitlines()
    after = [line.split() for line in lines[lines.index(heading) + 2 :]]
    assert after[:2] == [[f"{i}.00", "xla", f"sparse-prefill:seed={i}"] for i in (11, 10)]
    assert after[9][0] == "2.00" and not after[10]
    assert heading not in show(report(*rows))
    assert heading not in show(report(*rows[:3]), verbose=True)


def test_each_row_has_its_seconds_where_all_rows_are_shown():
    made = report(row())
    lines = [line.split()[-2:] for line in show(made, verbose=True).splitlines()]
    assert ["1.25", row().case] in lines
    assert "| 1.25 |" in render(made)


def test_quiet_keeps_failures_problems_and_the_headline():
    text = show(report(row(), BASE_2, UNSUPPORTED, unavailable=("no flash_mla",)), quiet=True)
    assert "UNSUPPORTED" not in text
    assert "bound" not in text
    assert "NUMERIC my|kernels.py:attend" in text
    assert "no flash_mla\n" in text
    assert text.splitlines()[-1] == (
        "my|kernels.py:attend failed in 1 of 1 compared case (exit status 1)."
    )


def test_every_status_appears_with_its_reason():
    text = show(EVERYTHING, verbose=True)
    for number, status in enumerate(Status):
        assert status.value in text
        assert status is Status.PASS or f"because of {number}" in text


def show(made, *, width: int = 100, **options) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    terminal.show(made, console, **options)
    return console.file.getvalue()  # type: ignore[attr-defined]
