"""An implementation in a process of its own: whatever it does costs one case, not the run."""

from __future__ import annotations

from typing import Any

from compare.isolation.child import Child
from compare.isolation.failures import Raised
from compare.isolation.transfer import fingerprint, pack
from compare.protocol.case import Case
from compare.protocol.implementation import (
    Implementation,
    TimedOut,
    UnknownImplementation,
    Unsupported,
    WorkerDied,
)
from compare.protocol.inputs import Inputs, Result
from compare.suites.table import SUITES

LOAD_SECONDS = 600.0
"""How long imports, and what a module compiles while it is imported, may take."""


class Isolated:
    """The implementation that `target` names, run by a worker process.

    The process stays for the next case and is started anew after a crash, a timeout or a fault
    that its GPU context didn't survive. It makes a case's inputs itself, from the line; tensors of
    the caller's own (inputs.case is None) go there, and results come back, as files.

    finder: MODULE:FUNCTION, which gives the implementation of (target, device) in the worker.
    local: the same implementation in this process, only to be asked what it supports; without one
    the worker is asked, as for a user's function, whose module this process never imports.
    timeout: seconds that one call may take, None for no limit. What a user's function prints is
    passed on to stderr.
    """

    def __init__(
        self,
        target: str,
        device: str | None = None,
        local: Implementation | None = None,
        *,
        finder: str,
    ) -> None:
        self.target = target
        self._finder = finder
        self.device = device
        self.timeout: float | None = None
        self._local = local
        self._child: Child | None = None
        self._loaded: tuple[str, frozenset[str]] | None = None
        self._load_failure: Exception | None = None

    @property
    def name(self) -> str:
        if self._local is not None:
            return self._local.name
        return self.target if self._loaded is None else self._loaded[0]

    @property
    def suites(self) -> frozenset[str]:
        """The suites it serves; where its module can't be imported, all: run() says why."""
        if self._local is not None:
            return self._local.suites
        if not self._load() or self._loaded is None:
            return frozenset(SUITES)
        return self._loaded[1]

    def supports(self, case: Case) -> str | None:
        if self._local is not None:
            return self._local.supports(case)
        if not self._load():
            return None
        return self._ask("supports", str(case))[1]

    def unavailable(self) -> str | None:
        """Why it can't run on this machine at all, where that is known without the worker."""
        ask = getattr(self._local, "unavailable", None)
        return None if ask is None else ask()

    def prepare(self, case: Case) -> None:
        """Lets the worker make this case's inputs while this process does something else."""
        if self._load():
            assert self._child is not None
            self._child.send(("prepare", str(case)))

    def run(self, inputs: Inputs) -> Result:
        return self.run_timed(inputs)[0]

    def run_timed(self, inputs: Inputs) -> tuple[Result, float]:
        """The result, and the seconds that the call took over there.

        Raises Unsupported (it raised NotImplementedError), Raised, WorkerDied or TimedOut.
        """
        self._require()
        case = None if inputs.case is None else str(inputs.case)
        self._ask("run", case, fingerprint(inputs), pack(inputs) if case is None else None)
        _, result, seconds = self._answer(self.timeout)
        return result, seconds

    def check(self) -> None:
        """Starts the worker. UnknownImplementation where there is no such target; any other
        failure of its module is each case's own (run() raises it)."""
        self._load()

    def close(self) -> None:
        """Ends the worker; the next call starts another one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _load(self) -> bool:
        """Whether there is a worker that holds the implementation, started if need be."""
        if self._load_failure is not None:
            return False
        if self._child is not None:
            return True
        self._child = Child("compare.isolation.worker_main", echo=self._local is None)
        try:
            answer = self._ask("load", self._finder, self.target, self.device, timeout=LOAD_SECONDS)
        except (Raised, Unsupported, WorkerDied, TimedOut) as error:
            self.close()
            self._load_failure = error
            return False
        self._loaded = (answer[1], answer[2])
        return True

    def _require(self) -> None:
        if not self._load():
            assert self._load_failure is not None
            raise self._load_failure

    def _ask(self, *request: Any, timeout: float | None = None) -> Any:
        assert self._child is not None
        try:
            self._child.send(request)
        except WorkerDied:
            self._child = None
            raise
        return self._answer(timeout)

    def _answer(self, timeout: float | None) -> Any:
        assert self._child is not None
        try:
            answer = self._child.receive(timeout)
        except (WorkerDied, TimedOut):
            self._child = None
            raise
        except BaseException:  # Ctrl-C: the answer that is still to come would be the next one's
            self.close()
            raise
        if answer[0] == "unknown":
            self.close()
            raise UnknownImplementation(answer[1])
        if answer[0] == "failed":
            _, failure, healthy = answer
            if not healthy:
                self.close()
            if failure.unsupported:
                raise Unsupported(failure.message or "it raised NotImplementedError")
            raise Raised(failure)
        return answer
