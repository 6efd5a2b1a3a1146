from __future__ import annotations

import io
import time

from compare.report import progress as module
from compare.report.progress import JobProgress


def test_a_short_job_shows_nothing():
    stream = io.StringIO()
    with JobProgress(stream=stream) as progress:
        progress(1, 2, "xla on a case")
    assert stream.getvalue() == ""


def test_a_long_step_shows_in_plain_lines_off_a_terminal(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.02)
    monkeypatch.setattr(module, "_BETWEEN_LINES", 0.02)
    stream = io.StringIO()
    with JobProgress(stream=stream) as progress:
        progress(3, 45, "xla on sparse-prefill:[red]s_q=3[/red]")
        _wait_for(stream, lines=2)
    for line in stream.getvalue().splitlines()[-2:]:
        assert line.startswith("3/45 after 0 s")
        assert line.endswith("xla on sparse-prefill:[red]s_q=3[/red]")


def test_until_the_first_step_it_says_what_comes_first(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.02)
    stream = io.StringIO()
    with JobProgress("loading the implementations", stream):
        _wait_for(stream, lines=1)
    assert stream.getvalue() == "after 0 s  loading the implementations\n"


def test_quiet_shows_nothing(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    stream = io.StringIO()
    with JobProgress(stream=stream, quiet=True) as progress:
        progress(1, 2, "xla")
        time.sleep(0.05)
    assert stream.getvalue() == ""


def test_on_a_terminal_a_bar_is_shown_and_taken_away(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with JobProgress(stream=stream) as progress:
        progress(3, 45, "xla")
        time.sleep(0.5)
    assert "3/45" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # the last thing it does is erase its line


def _wait_for(stream: io.StringIO, *, lines: int) -> None:
    deadline = time.monotonic() + 10
    while stream.getvalue().count("\n") < lines and time.monotonic() < deadline:
        time.sleep(0.01)
