"""Several cases at once: each job a process with a jax and a torch of its own that asks for the
next cases when it is done with some, and streams its events back.

Cases of one shape go to one job, see `compare.run.schedule`. A job whose process dies costs the
candidate that it was running; another process takes up the rest.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing.connection
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from compare.isolation.child import Child
from compare.protocol.implementation import Implementation, WorkerDied
from compare.protocol.verdict import Status, Verdict
from compare.run import registry
from compare.run.schedule import stages
from compare.run.session import Compared
from compare.run.tasks import Event, Finished, Options, Starting, Task, row_of, target_of

_END_SECONDS = 10.0
"""How long a job may take to end its workers and itself when nothing is left to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What a job may be asked before its order: a function's answer."""

    function: Callable[[Sequence[str], str | None], Any]
    suites: Sequence[str]
    device: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What a job is told first: implementations by the name to find them by. Lists of tasks (case
    index, line, places of candidates) follow, None after the last."""

    candidates: Sequence[str]
    references: Mapping[str, str]
    by_name: bool
    options: Options


@dataclasses.dataclass
class _Job:
    """A process and what it has still to do of its group: case index -> task. last: what it began
    last of that; lived: it has begun anything at all."""

    child: Child
    tasks: dict[int, Task] = dataclasses.field(default_factory=dict)
    last: Starting | None = None
    lived: bool = False

    def give(self, group: Sequence[Task] | None) -> None:
        """The next cases; None: there are no more."""
        self.tasks = {task.index: task for task in group or ()}
        self.last = None
        lines = [(t.index, str(t.case), t.candidates) for t in group or ()]
        self.tell(lines or None)

    def tell(self, message: Any) -> None:
        # Of a process that is gone the next `receive` tells, with its last words.
        with contextlib.suppress(OSError):
            self.child.connection.send(message)


class Jobs:
    """The processes of a run, at most `count` at the same time; none for a count of 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._started: list[Child] = []

    def start(self, most: int) -> None:
        """Starts processes before there is anything to tell them: their imports take seconds."""
        if self.count > 1 and most > 1:
            self._started = [_child(self.count) for _ in range(min(self.count, most))]

    def close(self) -> None:
        """Ends those that nothing was given to."""
        while self._started:
            self._started.pop().close()

    def ask[Answer](
        self,
        function: Callable[[Sequence[str], str | None], Answer],
        suites: Sequence[str],
        device: str | None,
    ) -> Answer:
        """What a function of the registry finds out, in one of them where there are any: then this
        process needn't import jax and torch to know what runs here."""
        while self._started:
            child = self._started[-1]
            try:
                child.connection.send(Question(function=function, suites=suites, device=device))
                return child.receive()
            except (OSError, WorkerDied):
                self._started.pop().close()
        return function(suites, device)

    def events(
        self, tasks: Sequence[Task], compared: Compared, options: Options
    ) -> Generator[Event]:
        """The events of all jobs as they come. Closing the generator ends them."""
        order = Order(
            candidates=[_words_for(candidate) for candidate in compared.candidates],
            references={suite: _words_for(r) for suite, r in compared.references.items()},
            by_name=compared.by_name,
            options=options,
        )
        compared.close()  # each job has workers of its own
        for groups in stages(tasks):
            yield from self._stage(groups, compared.candidates, order)
            self.close()

    def _stage(
        self, groups: Sequence[list[Task]], candidates: Sequence[Implementation], order: Order
    ) -> Generator[Event]:
        """Groups beside one another, each given to the next job that is free."""
        jobs = min(self.count, len(groups))
        waiting = collections.deque(groups)
        running: list[_Job] = []
        ending: list[_Job] = []

        def start() -> None:
            job = _Job(self._started.pop() if self._started else _child(jobs))
            running.append(job)
            job.tell(order)
            job.give(waiting.popleft())

        try:
            for _ in range(jobs):
                start()
            self.close()
            while running:
                ready = multiprocessing.connection.wait([j.child.connection for j in running])
                for job in [j for j in running if j.child.connection in ready]:
                    try:
                        event = job.child.receive()
                    except WorkerDied as error:
                        running.remove(job)
                        yield from _blame(job, candidates, str(error))
                        if job.tasks:
                            waiting.appendleft(list(job.tasks.values()))
                        if waiting:
                            start()
                        continue
                    if event is not None:
                        _note(job, event)
                        yield event
                    elif waiting:
                        job.give(waiting.popleft())
                    else:
                        job.give(None)
                        running.remove(job)
                        ending.append(job)
        finally:
            for job in running:
                job.child.close()
            for job in ending:
                job.child.let_end(_END_SECONDS)


def _words_for(implementation: Implementation) -> str:
    """The words by which another process finds the same implementation."""
    target = target_of(implementation)
    if target in registry.names() or hasattr(implementation, "target"):
        return target
    raise ValueError(
        f"{implementation.name} is an object of this process; with jobs > 1 implementations are "
        "found by name (MODULE:FUNCTION or FILE.py:FUNCTION)"
    )


_LEAST_POOL = 8


def _child(jobs: int) -> Child:
    """A process with its share of the cores, that doesn't take all of a GPU's memory; what the user
    set stays."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    wanted = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "OMP_NUM_THREADS": str(threads),
        # XLA's own word for the size of its CPU thread pool. Under Pallas' interpreter a role that
        # waits may hold a thread, so that too few wait for ever.
        "NPROC": str(max(threads, _LEAST_POOL)),
    }
    environment = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return Child("compare.run.job_main", environment)


def _note(job: _Job, event: Event) -> None:
    job.lived = True
    if isinstance(event, Starting):
        job.last = event
    elif isinstance(event, Finished):
        task = job.tasks[event.case]
        left = tuple(place for place in task.candidates if place != event.candidate)
        if left:
            job.tasks[event.case] = dataclasses.replace(task, candidates=left)
        else:
            del job.tasks[event.case]


def _blame(job: _Job, candidates: Sequence[Implementation], obituary: str) -> Iterator[Finished]:
    """The rows of what a dead process was working on: the candidate that ran, or, where it was at
    what a case's candidates share, all that were left; of one that never began, everything. One
    that ended between two groups of cases takes nothing with it."""
    blamed: dict[int, tuple[int, ...]] = {}
    reason = obituary
    if job.last is None:
        blamed = {} if job.lived else {task.index: task.candidates for task in job.tasks.values()}
    elif job.last.case in job.tasks:
        place = job.last.candidate
        if place is None:
            blamed[job.last.case] = job.tasks[job.last.case].candidates
            reason = f"while its inputs, its reference or the judge ran, {obituary}"
        else:
            blamed[job.last.case] = (place,)
    verdict = Verdict(status=Status.CRASH, reason=reason)
    for index, places in blamed.items():
        case = job.tasks[index].case
        for place in places:
            candidate = candidates[place]
            row = row_of(case, candidate.name, target_of(candidate), verdict)
            event = Finished(index, place, row)
            _note(job, event)
            yield event
