"""Several cases at once: each job a process with a jax and a torch of its own that takes a share of
the cases and streams its events back.

Cases of one shape go to one job, since a kernel is compiled once for each shape in each process. A
job whose process dies costs the candidate that it was running; another process takes up the rest.
"""

from __future__ import annotations

import dataclasses
import multiprocessing.connection
import os
from collections.abc import Generator, Iterator, Mapping, Sequence

from compare.cases.case import Case
from compare.cases.sparse_prefill import SparsePrefillCase
from compare.judge.verdict import Status, Verdict
from compare.report.report import Row
from compare.run.child import Child
from compare.run.implementations import WorkerDied
from compare.run.session import Event, Finished, Options, Starting, Task

_OVERHEAD_FLOP = 2 * 10**11
"""What a shape costs besides its arithmetic (compilation, mostly), in the FLOP of that time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What a job is told: implementations by the name to find them by, cases as lines."""

    candidates: Sequence[str]
    references: Mapping[str, str]
    options: Options
    tasks: Sequence[tuple[int, str, tuple[int, ...]]]


@dataclasses.dataclass
class _Job:
    """A process and what it has still to do: case index -> places of candidates."""

    child: Child
    tasks: dict[int, Task]
    last: Starting | None = None


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
    """
    parts = shares(tasks, jobs)
    if options.interpreter_seconds is not None:
        seconds = options.interpreter_seconds / len(parts)
        options = dataclasses.replace(options, interpreter_seconds=seconds)
    threads = max(1, (os.cpu_count() or 1) // len(parts))

    def start(part: Sequence[Task]) -> _Job:
        job = _Job(Child("compare.run.job_main", _environment(threads)), {t.index: t for t in part})
        lines = [(t.index, str(t.case), t.candidates) for t in part]
        job.child.send(
            Order(candidates=candidates, references=references, options=options, tasks=lines)
        )
        return job

    running: list[_Job] = []
    try:
        running += [start(part) for part in parts]
        while running:
            ready = multiprocessing.connection.wait([j.child.connection for j in running])
            for job in [j for j in running if j.child.connection in ready]:
                try:
                    event = job.child.receive()
                except WorkerDied as error:
                    running.remove(job)
                    yield from _blame(job, candidates, names, str(error))
                    if job.tasks:
                        running.append(start(list(job.tasks.values())))
                    continue
                if event is None:
                    job.child.close()
                    running.remove(job)
                    continue
                _note(job, event)
                yield event
    finally:
        for job in running:
            job.child.close()


def shares(tasks: Sequence[Task], jobs: int) -> list[list[Task]]:
    """At most `jobs` lists of tasks of about the same cost, none empty; equal shapes stay together
    and every list is in the order of `tasks`."""
    shapes: dict[tuple[object, ...], list[Task]] = {}
    for task in tasks:
        shapes.setdefault(_shape(task.case), []).append(task)
    bins: list[tuple[float, list[Task]]] = [(0.0, []) for _ in range(min(jobs, len(shapes)))]
    for group in sorted(shapes.values(), key=_cost, reverse=True):
        place = min(range(len(bins)), key=lambda i: bins[i][0])
        cost, part = bins[place]
        bins[place] = (cost + _cost(group), part + group)
    return [sorted(part, key=lambda task: task.index) for _, part in bins]


def _shape(case: Case) -> tuple[object, ...]:
    """What a kernel is compiled for."""
    if not isinstance(case, SparsePrefillCase):
        return (case.suite,)
    tokens = case.q_lens or case.tokens
    sink, length = case.sink != "none", case.length != "none"
    return (case.suite, tokens, case.s_kv, case.h, case.d, case.topk, sink, length)


def _cost(tasks: Sequence[Task]) -> float:
    flop = sum(t.case.flop for t in tasks if isinstance(t.case, SparsePrefillCase))
    return flop + _OVERHEAD_FLOP


def _environment(threads: int) -> dict[str, str]:
    """Each job its share of the cores, and none all of a GPU's memory; what the user set stays."""
    wanted = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "OMP_NUM_THREADS": str(threads),
        "NPROC": str(threads),  # XLA's own word for the size of its CPU thread pool
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def _note(job: _Job, event: Event) -> None:
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
    what a case's candidates share, all that were left; of one that never began, everything."""
    blamed: dict[int, tuple[int, ...]] = {}
    reason = obituary
    if job.last is None:
        blamed = {task.index: task.candidates for task in job.tasks.values()}
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
