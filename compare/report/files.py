"""A report as files: the formats by name, and where they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from compare.protocol.report import Report
from compare.report import json, junit, markdown

# Format: file name and writer. `html` isn't one of them.
FORMATS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "json": ("report.json", json.dump),
    "junit": ("junit.xml", junit.render),
    "md": ("report.md", markdown.render),
}


def write(report: Report, formats: Iterable[str], folder: Path) -> tuple[Path, ...]:
    """Writes the report in each format to `folder`, which is made if it isn't there; the files
    written. With ``md`` in a GitHub workflow the job summary gets the same text."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name in formats:
        file_name, render = FORMATS[name]
        text = render(report)
        path = folder / file_name
        # A lone surrogate, of bytes that weren't text, stays readable as its escape.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        written.append(path)
        if name == "md" and (job_summary := markdown.append_step_summary(text)):
            written.append(job_summary)
    return tuple(written)
