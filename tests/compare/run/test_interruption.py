"""Signals that end a run."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from compare.run import interruption
from compare.run.interruption import signals_end_in_order, work_is_over

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python's handler runs between two of its own instructions


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_the_work_as_ctrl_c_does(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), signals_end_in_order():
        send(number)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_sent_twice_ends_the_work_once(number: int) -> None:
    with signals_end_in_order():
        with pytest.raises(KeyboardInterrupt):
            send(number)
        send(number)
        send(signal.SIGTERM)


def test_an_interruption_that_was_lost_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "_ECHO_SECONDS", 0.0)
    with signals_end_in_order():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGTERM)


def test_nothing_but_a_second_ctrl_c_stops_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "_ECHO_SECONDS", 0.0)
    with signals_end_in_order():
        work_is_over()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            send(number)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_what_the_program_around_does_with_a_signal_stays() -> None:
    met = []
    before = signal.signal(signal.SIGTERM, lambda *_: met.append("theirs"))
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_end_in_order():
            send(signal.SIGTERM)
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, hangup)
    assert met == ["theirs"]


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with signals_end_in_order():
        assert [signal.getsignal(number) for number in ENDING] != before
    assert [signal.getsignal(number) for number in ENDING] == before


def test_outside_the_main_thread_no_signal_is_touched() -> None:
    found = []

    def work() -> None:
        with signals_end_in_order():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
