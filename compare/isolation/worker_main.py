"""The worker process of an isolated implementation: holds it, and runs it when it is asked to."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from compare.isolation.failures import Failure
from compare.isolation.transfer import fingerprint, pack, receive, send
from compare.protocol.implementation import Implementation, UnknownImplementation, warm_up
from compare.protocol.inputs import Inputs
from compare.protocol.suite import lookup


def main(fd: int) -> None:
    """Answers requests on `fd` until the other end closes it. Requests and their answers:

    ("load", finder, name, device) -> ("loaded", name, suites) | ("unknown", sentence)
    ("supports", line)        -> ("supports", reason)
    ("prepare", line)         no answer: makes the inputs of the case that comes next
    ("run", line, fingerprint, inputs) -> ("ready",), then ("result", result, seconds)
    or, to each of these, ("failed", Failure, healthy); unhealthy: this process is spoilt.
    """
    faulthandler.enable(all_threads=False)
    os.set_inheritable(fd, False)
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    worker = _Worker(Connection(fd))
    try:
        while True:
            worker.answer(receive(worker.connection))
    except (EOFError, OSError):
        return


def end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, even while a kernel hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class _Worker:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._implementation: Implementation | None = None
        self._prepared: tuple[str, Inputs] | None = None

    def answer(self, request: tuple[Any, ...]) -> None:
        word, *arguments = request
        try:
            answer = getattr(self, f"_{word}")(*arguments)
        except UnknownImplementation as error:
            answer = ("unknown", str(error))
        except Exception as error:
            answer = ("failed", Failure.of(error), _healthy())
        sys.stdout.flush()
        sys.stderr.flush()
        if answer is not None:
            send(self.connection, answer)

    def _load(self, finder: str, name: str, device: str | None) -> tuple[Any, ...]:
        if device is not None and device.startswith("cuda:"):
            import torch

            torch.cuda.set_device(device)
        implementation: Implementation = lookup(finder)(name, device)
        warm_up(implementation)
        self._implementation = implementation
        return ("loaded", implementation.name, implementation.suites)

    def _supports(self, line: str) -> tuple[Any, ...]:
        from compare.suites.table import parse_case

        assert self._implementation is not None
        return ("supports", self._implementation.supports(parse_case(line)))

    def _prepare(self, line: str) -> None:
        try:
            self._inputs(line)
        except Exception:  # the run that follows fails in the same way and says so
            self._prepared = None

    def _run(self, line: str | None, expected: str, given: Inputs | None) -> tuple[Any, ...]:
        assert self._implementation is not None
        if line is None:
            self._prepared = None
            assert given is not None
            inputs = given
        else:
            inputs = self._inputs(line)
            if fingerprint(inputs) != expected:
                raise ValueError(
                    "these inputs carry a case but aren't what its line makes; "
                    "case=None is for tensors of one's own"
                )
        self.connection.send(("ready",))
        started = time.perf_counter()
        result = self._implementation.run(inputs)
        _synchronize()
        seconds = time.perf_counter() - started
        return ("result", pack(result), seconds)

    def _inputs(self, line: str) -> Inputs:
        from compare.suites.table import make_inputs, parse_case

        if self._prepared is None or self._prepared[0] != line:
            self._prepared = None  # the old one's memory goes before the new one's comes
            self._prepared = (line, make_inputs(parse_case(line)))
        return self._prepared[1]


def _synchronize() -> None:
    """A fault of a kernel that is still running belongs to the call that started it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _healthy() -> bool:
    """Whether the GPU context survived: after an illegal access every later call would fail too."""
    try:
        _synchronize()
        jax = sys.modules.get("jax")
        if jax is not None:
            jax.numpy.zeros(1).block_until_ready()
    except Exception:
        return False
    return True
