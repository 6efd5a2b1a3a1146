"""A report as JUnit XML: what GitHub, GitLab and Jenkins show beside a change.

One testsuite for each suite, one testcase for each case and candidate. A wrong answer is a
<failure>; a candidate that raised, died or ran out of time is an <error>; UNSUPPORTED is
<skipped> with its reason. What is wrong with the run as a whole (something asked for isn't
available, a reference failed, too few cases were compared) is a testsuite of its own, so that
the file is green exactly when the exit status is 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree as ET

from compare.protocol.report import Report, Row
from compare.protocol.verdict import Status
from compare.report import summary, text

_RAISED = (Status.ERROR, Status.CRASH, Status.TIMEOUT)
# XML 1.0 has no way to write these, not even as a character reference.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(report: Report) -> str:
    """The report as the text of a JUnit XML file."""
    root = ET.Element("testsuites", name="mla-crosscheck", time=f"{report.seconds:.3f}")
    suites: dict[str, list[Row]] = {}
    for row in report.rows:
        suites.setdefault(summary.suite_of(row), []).append(row)
    for name, rows in suites.items():
        _add_suite(root, name, report, [_testcase(row, report) for row in rows])
    if problems := summary.problems(report):
        _add_suite(root, "run", report, [_problem(sentence) for sentence in problems])
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_suite(root: ET.Element, name: str, report: Report, cases: Iterable[ET.Element]) -> None:
    suite = ET.SubElement(root, "testsuite", name=name)
    properties = ET.SubElement(suite, "properties")
    for key, value in [*report.environment.items(), ("profile", report.profile)]:
        ET.SubElement(properties, "property", name=_xml(key), value=_xml(value))
    suite.extend(cases)
    for count, tag in {"failures": "failure", "errors": "error", "skipped": "skipped"}.items():
        suite.set(count, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in suite):.3f}")


def _testcase(row: Row, report: Report) -> ET.Element:
    verdict = row.verdict
    case = ET.Element(
        "testcase",
        # Readers group by class name, and a dot in it would be taken for a package.
        classname=_xml(f"{summary.suite_of(row)}/{row.candidate}".replace(".", "_")),
        name=_xml(row.case),
        time=f"{row.seconds:.3f}",
    )
    message = _xml(text.first_line(row))
    if verdict.status is Status.UNSUPPORTED:
        ET.SubElement(case, "skipped", message=_xml(verdict.reason or "no reason given"))
    elif verdict.status.failed:
        tag = "error" if verdict.status in _RAISED else "failure"
        found = ET.SubElement(case, tag, message=message, type=verdict.status.value)
        found.text = _xml("\n".join(text.failure_lines(row, report)))
    else:
        ET.SubElement(case, "system-out").text = _xml("\n".join(text.passed_lines(row)))
    return case


def _problem(sentence: str) -> ET.Element:
    case = ET.Element("testcase", classname="run", name=_xml(sentence), time="0.000")
    ET.SubElement(case, "error", message=_xml(sentence), type="RUN").text = _xml(sentence)
    return case


def _xml(value: str) -> str:
    """`value` with the characters that XML can't hold written as Python escapes, e.g. a
    terminal's \\x1b.
    """
    return _NOT_XML.sub(lambda match: ascii(match[0])[1:-1], value)
