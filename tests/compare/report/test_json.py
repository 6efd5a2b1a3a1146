from __future__ import annotations

import dataclasses
import json
import math

import pytest

from compare.protocol.verdict import Worst
from compare.report.json import SCHEMA_VERSION, dump, load
from tests.compare.report.fabricated import EVERYTHING, report, row


@pytest.mark.parametrize("made", [report(), report(row()), EVERYTHING], ids=["none", "one", "all"])
def test_a_report_comes_back_equal(made):
    assert load(dump(made)) == made


def test_nan_and_infinities_are_strings_and_come_back():
    worst = [
        Worst(tensor="lse", index=(0, i), got=value, expected=0.1 + 0.2, share=1.0)
        for i, value in enumerate((math.nan, math.inf, -math.inf))
    ]
    text = dump(report(row(worst=tuple(worst), share=math.nan)))
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} isn't JSON"))
    said = data["rows"][0]["verdict"]
    assert [w["got"] for w in said["worst"]] == ["NaN", "Infinity", "-Infinity"]
    assert said["share"] == "NaN"
    back = load(text).rows[0].verdict
    assert math.isnan(back.worst[0].got)
    assert [w.got for w in back.worst[1:]] == [math.inf, -math.inf]
    assert back.worst[0].expected == 0.1 + 0.2
    assert isinstance(back.worst[0].index, tuple)


def test_a_worst_place_where_any_finite_value_is_due_comes_back():
    worst = Worst(tensor="out", index=(0, 1, 2), got=math.inf, expected=None, share=math.inf)
    made = report(row(worst=(worst,)))
    assert json.loads(dump(made))["rows"][0]["verdict"]["worst"][0]["expected"] is None
    assert load(dump(made)) == made


def test_readers_find_the_outcome_without_this_program():
    data = json.loads(dump(EVERYTHING))
    assert data["schema"] == "mla-crosscheck/report"
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["exit_status"] == 1
    assert data["compared"] == EVERYTHING.compared
    assert data["environment"]["jax"] == "0.11.2"


def test_every_field_of_a_report_is_written():
    data = json.loads(dump(EVERYTHING))
    assert {f.name for f in dataclasses.fields(EVERYTHING)} <= set(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "isn't JSON"),
        ("[]", "schema: None"),
        ('{"schema": "other"}', "'mla-crosscheck/report'"),
        ('{"schema": "mla-crosscheck/report", "schema_version": 99}', "99; accepted: 1"),
        ('{"schema": "mla-crosscheck/report", "schema_version": 1}', "rows is missing"),
    ],
)
def test_another_text_is_refused_in_a_sentence(text, said):
    with pytest.raises(ValueError, match=said):
        load(text)


def test_a_field_of_the_wrong_type_is_named():
    data = json.loads(dump(report(row())))
    data["rows"][0]["case"] = 3
    with pytest.raises(ValueError, match=r"report\.rows\[0\]\.case: 3; accepted: str"):
        load(json.dumps(data))
