from __future__ import annotations

import pytest

from compare.protocol.verdict import Status
from tests.compare.report.fabricated import UNSUPPORTED, report, row

FAILED = [status for status in Status if status not in (Status.PASS, Status.UNSUPPORTED)]


def test_agreement_is_0():
    assert report(row()).exit_status == 0


@pytest.mark.parametrize("status", FAILED, ids=lambda status: status.value)
def test_every_failure_is_1(status):
    assert report(row(), row(status)).exit_status == 1


def test_an_unsupported_row_beside_a_compared_one_is_0():
    assert report(row(), UNSUPPORTED).exit_status == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"unavailable": ("pallas isn't available",)},
        {"interrupted": True},
    ],
    ids=["unavailable", "interrupted"],
)
def test_what_is_missing_is_3_and_a_failure_outranks_it(changes):
    assert report(row(), **changes).exit_status == 3
    assert report(row(), row(Status.SHAPE), **changes).exit_status == 1


def test_a_failed_reference_is_3_and_a_failed_candidate_outranks_it():
    reference_failed = row(reference_failed="outside its bound")
    assert report(row(), reference_failed).exit_status == 3
    assert report(reference_failed, row(Status.NUMERIC)).exit_status == 1


def test_nothing_compared_is_3():
    assert report().exit_status == 3
    assert report(UNSUPPORTED).exit_status == 3


def test_require_counts_distinct_compared_cases():
    other = row(case="sparse-prefill:seed=2")
    assert report(row(), other, require=2).exit_status == 0
    # The same case with two candidates is one case, and an unsupported one is none.
    assert report(row(), row(candidate="torch"), require=2).exit_status == 1
    unsupported = row(Status.UNSUPPORTED, case="sparse-prefill:seed=3")
    assert report(row(), other, unsupported, require=3).exit_status == 1


def test_require_outranks_nothing_compared():
    assert report(require=1).exit_status == 1
