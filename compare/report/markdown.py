"""A report as Markdown: the job summary of a CI run, and a table to paste into a change."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2

from compare.protocol.report import Report
from compare.report import summary, table, text

# GitHub refuses a job summary over 1 MiB, and nobody reads past this; the JSON report has every
# row.
_CASE_LIMIT, _FAILURE_LIMIT = 500, 50

_TEMPLATE = """\
# mla-crosscheck: {{ headline | cell }}

{{ environment | cell }}
{% for problem in problems %}
{% if loop.first %}

{% endif %}
- {{ problem | cell }}
{% endfor %}
{% for suite in suites %}

### {{ suite.title | cell }}

{{ suite.columns | line }}
{{ suite.columns | rule }}
{% for line in suite.lines %}
{{ line | line }}
{% endfor %}
{% endfor %}
{% for note in notes %}
{% if loop.first %}

{% endif %}
{{ note | cell }}<br>
{% endfor %}
{% if failures %}

## Failures
{% for lines in failures %}

### {{ lines[0] | cell }}

~~~~text
{% for line in lines[1:] %}
{{ line | fenced }}
{% endfor %}
~~~~
{% endfor %}
{% if failures_left %}

{{ failures_left }} more failures are in the JSON report and not shown here.
{% endif %}
{% endif %}
{% if unsupported %}

## Not compared

{% for line in unsupported %}
- {{ line | cell }}
{% endfor %}
{% endif %}
{% if cases %}

<details><summary>{{ rows }}</summary>

{{ case_columns | line }}
{{ case_columns | rule }}
{% for line in cases %}
{{ line | line }}
{% endfor %}
{% if cases_left %}

{{ cases_left }} more rows are in the JSON report and not shown here.
{% endif %}

</details>
{% endif %}

<details><summary>Environment</summary>

{% for name, value in report.environment.items() %}
- {{ name | cell }}: {{ value | cell }}
{% endfor %}
- profile: {{ report.profile }}
- run time: {{ "%.1f" | format(report.seconds) }} s

</details>
"""


def render(report: Report) -> str:
    """The report as GitHub-flavoured Markdown: headline, what is wrong with the run, one line
    for each suite and candidate, every failure with its reproducer, what wasn't compared and
    why, and all rows.
    """
    failed = summary.failures(report)
    cases = table.case_lines(report)
    return (
        _environment()
        .from_string(_TEMPLATE)
        .render(
            report=report,
            headline=summary.headline(report),
            environment=summary.environment_line(report),
            problems=summary.problems(report),
            suites=table.suite_tables(report),
            notes=table.notes(report),
            failures=[text.failure_lines(row, report) for row in failed[:_FAILURE_LIMIT]],
            failures_left=max(0, len(failed) - _FAILURE_LIMIT),
            unsupported=text.unsupported_lines(report),
            case_columns=table.CASE_COLUMNS,
            rows="1 row" if len(cases) == 1 else f"All {len(cases):,} rows",
            cases=cases[:_CASE_LIMIT],
            cases_left=max(0, len(cases) - _CASE_LIMIT),
        )
    )


def append_step_summary(markdown: str) -> Path | None:
    """Appends to the job summary of a GitHub workflow where GITHUB_STEP_SUMMARY names its file;
    the file, or None elsewhere.
    """
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return None
    with open(name, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(markdown + "\n")
    return Path(name)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    environment.filters["cell"] = _cell
    environment.filters["fenced"] = lambda line: line.replace("~~~~", "~ ~ ~ ~")
    environment.filters["line"] = lambda cells: f"| {' | '.join(map(_cell, cells))} |"
    environment.filters["rule"] = lambda cells: f"|{' --- |' * len(cells)}"
    return environment


def _cell(value: str) -> str:
    """`value` on one line, with nothing in it that Markdown or HTML would act on."""
    for character in "\\`*_[]|":
        value = value.replace(character, f"\\{character}")
    return " ".join(value.replace("&", "&amp;").replace("<", "&lt;").split())
