from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from compare.protocol.verdict import Status
from compare.report.junit import render
from tests.compare.report.fabricated import BASE_2, EVERYTHING, RAISED, UNSUPPORTED, report, row


def test_one_suite_each_and_one_testcase_for_each_case_and_candidate():
    plan = row(case="prefill-plan:seq=4,q=4", candidate="jax-planner")
    root = ET.fromstring(render(report(row(), row(candidate="torch"), plan)))
    assert root.tag == "testsuites"
    names = {
        suite.get("name"): [(c.get("classname"), c.get("name")) for c in suite.iter("testcase")]
        for suite in root
    }
    assert names == {
        "sparse-prefill": [
            ("sparse-prefill/xla", "sparse-prefill:s_q=3,s_kv=300,seed=7"),
            ("sparse-prefill/torch", "sparse-prefill:s_q=3,s_kv=300,seed=7"),
        ],
        "prefill-plan": [("prefill-plan/jax-planner", "prefill-plan:seq=4,q=4")],
    }


def test_a_failure_carries_diagnosis_worst_place_and_reproducer():
    case = _testcase(report(BASE_2))
    failure = case.find("failure")
    assert failure is not None and failure.text is not None
    assert failure.get("message") == "NUMERIC: lse is 1.4427 times the oracle's: base 2"
    assert failure.get("type") == "NUMERIC"
    assert "diagnosis lse-base-2" in failure.text
    assert "lse[2, 17]: got 6.7, expected 4.644" in failure.text
    assert "run sparse-prefill:s_q=3,s_kv=300,seed=7 --candidate" in failure.text


@pytest.mark.parametrize("status", [Status.ERROR, Status.CRASH, Status.TIMEOUT])
def test_a_candidate_without_an_answer_is_an_error(status):
    case = _testcase(report(row(status, reason="it went away")))
    found = case.find("error")
    assert found is not None and found.get("message") == f"{status.value}: it went away"
    assert case.find("failure") is None


def test_unsupported_is_skipped_with_its_reason():
    skipped = _testcase(report(UNSUPPORTED)).find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "needs a Hopper GPU; there is none here"


def test_counts_are_those_of_the_elements():
    root = ET.fromstring(render(EVERYTHING))
    for element in [root, *root]:
        for count, tag in [("failures", "failure"), ("errors", "error"), ("skipped", "skipped")]:
            assert element.get(count) == str(len(list(element.iter(tag)))), (element.attrib, tag)
        assert element.get("tests") == str(len(list(element.iter("testcase"))))


@pytest.mark.parametrize(
    "made",
    [
        report(),
        report(row()),
        report(UNSUPPORTED),
        report(row(), UNSUPPORTED),
        report(row(), require=1),
        report(row(), require=2),
        report(row(), unavailable=("pallas isn't available",)),
        report(row(), interrupted=True),
        report(row(reference_failed="outside its bound")),
        report(row(Status.NONDETERMINISTIC)),
        EVERYTHING,
    ],
)
def test_the_file_is_green_exactly_when_the_exit_status_is_0(made):
    root = ET.fromstring(render(made))
    red = root.get("failures") != "0" or root.get("errors") != "0"
    assert red == (made.exit_status != 0)


def test_text_that_xml_cannot_hold_is_escaped_visibly():
    text = render(report(RAISED))
    message = _testcase(report(RAISED)).find("error")
    assert message is not None
    assert message.get("message") == (
        r"ERROR: ValueError: \x1b[31mred\x1b[0m <&> ]]> \x00\ud800 ~~~~"
    )
    text.encode("utf-8")


def test_elements_stand_in_the_order_of_the_schema():
    root = ET.fromstring(render(EVERYTHING))
    for suite in root:
        tags = [child.tag for child in suite]
        assert tags == ["properties"] + ["testcase"] * (len(tags) - 1)
        for case in suite.iter("testcase"):
            assert case.get("name") and case.get("classname") and float(case.get("time", "-1")) >= 0
            assert len(case) <= 1


def _testcase(made) -> ET.Element:
    found = ET.fromstring(render(made)).find("testsuite/testcase")
    assert found is not None
    return found
