from __future__ import annotations

import math

import pytest

from compare.protocol.verdict import Diagnosis, Status, Worst
from compare.report import text
from tests.compare.report.fabricated import report, row


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "-"),
        (0.0, "0"),
        (2.074e-3, "2.07e-3"),
        (1.4e-6, "1.40e-6"),
        (0.4427, "0.443"),
        (2.84, "2.84"),
        (1.23e5, "1.23e5"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers_have_three_digits(value, said):
    assert text.number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "-"), (0.421, "42.1%"), (1.0, "100.0%"), (12.34, "12.3x"), (math.inf, "inf")],
)
def test_shares_are_percentages_until_ten_times_the_bound(value, said):
    assert text.share(value) == said


def test_an_exact_value_has_no_share_of_an_allowance():
    worst = Worst(tensor="lse", index=(0, 3), got=math.nan, expected=math.inf, share=math.inf)
    assert text.worst_place(worst) == "lse[0, 3]: got nan, expected inf"


def test_rows_that_the_oracle_left_out_are_counted():
    lines = text.passed_lines(row(rows_judged=256, rows_total=8_960_000))
    assert lines == ["judged by the oracle: 256 of 8,960,000 rows"]
    assert text.passed_lines(row(rows_judged=192, rows_total=192)) == []


def test_a_candidate_that_is_unavailable_is_said_once():
    made = report(
        row(),
        row(Status.UNSUPPORTED, candidate="pallas", reason="no GPU"),
        row(Status.UNSUPPORTED, candidate="pallas", reason="topk is too wide"),
        unavailable=("pallas: no GPU",),
    )
    assert text.unsupported_lines(made) == ["pallas, 1 case: topk is too wide"]


def test_a_diagnosis_that_the_reason_tells_already_is_named_only():
    sentence = "chunk 0 (request 0) has no query token"
    made = row(
        Status.PLAN,
        reason=f"P1: {sentence}",
        diagnosis=(Diagnosis(name="empty-chunk", sentence=sentence),),
    )
    lines = text.failure_lines(made, report(made))
    assert "diagnosis empty-chunk" in lines
    assert sum(sentence in line for line in lines) == 1
