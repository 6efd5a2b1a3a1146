"""SIGTERM as Ctrl-C: whoever ends a run (timeout, a CI server, a scheduler) still gets its report.

`timeout` sends its signal twice and CI servers send another one after SIGINT, so that what comes
after the signal that ended the work must not end the report's writing too.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_ECHO_SECONDS = 1.0
"""A signal so soon after one that counted is taken for its repetition."""


class Interruption:
    """The signals of one run. While the work lasts each raises KeyboardInterrupt in the main
    thread; once it is over only a second Ctrl-C does."""

    def __init__(self) -> None:
        self._over = False
        self._insisted = False
        self._last = -_ECHO_SECONDS

    def over(self) -> None:
        """The work has ended, and what remains is to put down what it found."""
        self._over = True

    def meet(self, number: int, _frame: FrameType | None) -> None:
        """The handler of the signals."""
        now = time.monotonic()
        if now - self._last < _ECHO_SECONDS:
            return
        if self._over and number != signal.SIGINT:
            return
        self._last = now
        if self._over and not self._insisted:
            self._insisted = True
            return
        raise KeyboardInterrupt


_active: list[Interruption] = []


@contextlib.contextmanager
def signals_end_in_order() -> Iterator[Interruption]:
    """While it lasts, SIGTERM and SIGHUP do what Ctrl-C does. A signal that the program around has
    a use for, or ignores (nohup), is left alone; so are all of them outside the main thread."""
    interruption = Interruption()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, interruption.meet)
    _active.append(interruption)
    try:
        yield interruption
    finally:
        _active.remove(interruption)
        for number, handler in before.items():
            signal.signal(number, handler)


def work_is_over() -> None:
    """Tells whoever watches the signals, if anybody does, that nothing is left to be ended."""
    for interruption in _active:
        interruption.over()
