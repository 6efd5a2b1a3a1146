"""The process of a job: runs its share of the cases and sends an event for whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from compare.houses.jax_backend import import_jax
from compare.isolation.worker_main import end_with
from compare.run import registry
from compare.run.jobs import Order, Question
from compare.run.session import Compared, Session
from compare.run.tasks import Task
from compare.suites.table import parse_case

_MOST_BYTES = 1_200_000_000


def main(fd: int) -> None:
    """Answers Questions on `fd`, takes an Order and then lists of tasks, each answered with its
    events and None."""
    faulthandler.enable(all_threads=False)
    os.set_inheritable(fd, False)
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    connection = Connection(fd)
    _import_ahead()
    order: Order | Question = connection.recv()
    while isinstance(order, Question):
        connection.send(order.function(order.suites, order.device))
        order = connection.recv()
    device = order.options.device
    compared = Compared(
        candidates=[registry.find(name, device) for name in order.candidates],
        references={suite: registry.find(n, device) for suite, n in order.references.items()},
        by_name=order.by_name,
    )
    session = Session(compared, order.options)
    try:
        while (lines := connection.recv()) is not None:
            tasks = [
                Task(index=index, case=parse_case(line), candidates=places)
                for index, line, places in lines
            ]
            for event in session.events(tasks):
                connection.send(event)
            connection.send(None)
            _forget_programs()
    finally:
        compared.close()


def _forget_programs() -> None:
    """Gives the memory of compiled programs back once there are many: those of a shape whose cases
    are done, which jax would keep, are most of them."""
    with contextlib.suppress(OSError, AttributeError):  # where there is no /proc, or another libc
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if pages * os.sysconf("SC_PAGE_SIZE") > _MOST_BYTES:
            import_jax().clear_caches()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)


def _import_ahead() -> None:
    """What the judge and most candidates need, while the run finds out what it is to compare."""
    import torch  # noqa: F401

    import_jax()
