"""Several cases at once: each job a process with a jax and a torch of its own that asks for the
next cases when it is done with some, and streams its events back.

Cases of one shape go to one job, see `compare.run.order`. A job whose process dies costs the
candidate that it was running; another process takes up the rest.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing.connection
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from compare.houses.jax_backend import INTERPRETERS
from compare.isolation.child import Child
from compare.protocol.implementation import WorkerDied
from compare.protocol.report import Row
from compare.protocol.verdict import Status, Verdict
from compare.run.order import by_shape, longest_first
from compare.run.session import Event, Finished, Options, Starting, Task

_END_SECONDS = 10.0
"""How long a job may take to end its workers and itself when nothing is left to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What a job is told first: implementations by the name to find them by. Lists of tasks (case
    index, line, places of candidates) follow, None after the last."""

    candidates: Sequence[str]
    references: Mapping[str, str]
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


def parallel_events(
    tasks: Sequence[Task],
    candidates: Sequence[str],
    names: Sequence[str],
    references: Mapping[str, str],
    options: Options,
    jobs: int,
) -> Generator[Event]:
    """The events of all jobs as they come. Closing the generator ends them.

    candidates, references: by the name to find them by; names: what reports call the candidates.
    Tasks that share the interpreter's time are begun in their order, others the longest first.
    """
    groups = by_shape(tasks)
    jobs = min(jobs, len(groups))
    if options.interpreter_seconds is not None and INTERPRETERS & set(names):
        seconds = options.interpreter_seconds / jobs
        options = dataclasses.replace(options, interpreter_seconds=seconds)
    else:
        groups = longest_first(groups)
    waiting = collections.deque(groups)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    running: list[_Job] = []
    ending: list[_Job] = []

    def start() -> None:
        job = _Job(Child("compare.run.job_main", _environment(threads)))
        running.append(job)
        job.tell(Order(candidates=candidates, references=references, options=options))
        job.give(waiting.popleft())

    try:
        for _ in range(jobs):
            start()
        while running:
            ready = multiprocessing.connection.wait([j.child.connection for j in running])
            for job in [j for j in running if j.child.connection in ready]:
                try:
                    event = job.child.receive()
                except WorkerDied as error:
                    running.remove(job)
                    yield from _blame(job, candidates, names, str(error))
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


_LEAST_POOL = 8


def _environment(threads: int) -> dict[str, str]:
    """Each job its share of the cores, and none all of a GPU's memory; what the user set stays."""
    wanted = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "OMP_NUM_THREADS": str(threads),
        # XLA's own word for the size of its CPU thread pool. Under Pallas' interpreter a role that
        # waits may hold a thread, so that too few wait for ever.
        "NPROC": str(max(threads, _LEAST_POOL)),
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


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


def _blame(
    job: _Job, candidates: Sequence[str], names: Sequence[str], obituary: str
) -> Iterator[Finished]:
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
    for index, places in blamed.items():
        line = str(job.tasks[index].case)
        for place in places:
            verdict = Verdict(status=Status.CRASH, reason=reason)
            row = Row(
                case=line,
                candidate=names[place],
                reference=None,
                verdict=verdict,
                seconds=0.0,
                target=None if candidates[place] == names[place] else candidates[place],
            )
            event = Finished(index, place, row)
            _note(job, event)
            yield event
