"""Progress of a long job on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_PATIENCE = 2.0  # seconds before anything is shown
_BETWEEN_LINES = 10.0  # seconds between plain lines


class JobProgress:
    """``with JobProgress(first) as progress: progress(done, total, what)``, from any thread.

    The job calls it whenever a step begins or ends: done of total steps, and in a few words what
    is being worked on; `first` until then. What is shown has a thread of its own, so that a
    single long step shows too.
    """

    def __init__(
        self, first: str = "starting", stream: TextIO | None = None, *, quiet: bool = False
    ) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._quiet = quiet
        self._started = time.monotonic()
        self._state: tuple[int, int | None, str] = (0, None, first)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __call__(self, done: int, total: int, what: str = "") -> None:
        self._state = (done, total, what)

    def __enter__(self) -> JobProgress:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _show(self) -> None:
        if self._over.wait(_PATIENCE):
            return
        if self._console.is_terminal:
            self._show_bar()
        else:
            self._show_lines()

    def _show_lines(self) -> None:
        while True:
            done, total, what = self._state
            seconds = time.monotonic() - self._started
            counted = f"{done}/{total} " if total is not None else ""
            line = f"{counted}after {seconds:.0f} s  {what}".rstrip()
            print(line, file=self._console.file, flush=True)
            if self._over.wait(_BETWEEN_LINES):
                return

    def _show_bar(self) -> None:
        bar = Progress(
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
        )
        with bar:
            task = bar.add_task("", total=None)
            while True:
                done, total, what = self._state
                bar.update(task, completed=done, total=total, description=what)
                if self._over.wait(0.2):
                    return
