"""In which order cases are begun, and in how many processes. Rows stand in a report in the order of
the cases, whatever it is.

Cases of one shape stay together, since a kernel is compiled once for each shape in each process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from compare.protocol.case import Case
from compare.protocol.implementation import Implementation
from compare.run import registry
from compare.run.tasks import Task
from compare.suites.table import SUITES

_SHAPE_ELEMENTS = 4_000_000
"""What a shape costs besides its tensors (compilation, mostly), in elements of that time."""

_INTERPRETED_SHAPES = 8
"""What the interpreter spends on a marked case, in shapes."""

_ALONE_ELEMENTS = 2**31
"""4 GB of bfloat16 in q and out."""

_MOST_JOBS = 8
_SHAPE_SECONDS, _CASE_SECONDS = 0.5, 0.05
"""Of a default run: a shape's compilation for all candidates, and a case's inputs and judging."""
_JOB_SECONDS = 8.0
"""Of work in all, for each job: another one spends five on its imports."""
_JOB_BYTES = 1_300_000_000
"""Memory of a job that has compiled the default cases."""


def stages(tasks: Sequence[Task]) -> list[list[list[Task]]]:
    """Groups of tasks that may run beside one another, longest first; what has to be alone follows,
    each a stage of its own."""
    beside = [task for task in tasks if not alone(task.case)]
    first = [longest_first(by_shape(beside))] if beside else []
    return [*first, *([[task]] for task in tasks if alone(task.case))]


def helpful_jobs(cases: Sequence[Case], candidates: Sequence[Implementation | str] | None) -> int:
    """How many processes make a run shorter: as many as there are cores and memory for, unless its
    work is done before they have imported what they need."""
    compiled = candidates is None
    for candidate in candidates or ():
        if not isinstance(candidate, str):
            return 1  # an object of this process
        compiled |= candidate in registry.TABLE and not registry.TABLE[candidate].isolated
    shapes = len({(case.suite, *case.shape()) for case in cases}) if compiled else 0
    seconds = shapes * _SHAPE_SECONDS + len(cases) * _CASE_SECONDS
    cores, memory = len(os.sched_getaffinity(0)), _available_bytes()
    return max(1, min(_MOST_JOBS, cores, int(memory / _JOB_BYTES), int(seconds / _JOB_SECONDS)))


def _available_bytes() -> float:
    """The memory that is free for programs, as far as the system tells."""
    try:
        words = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(words["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float("inf")


def by_shape(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks of each shape, the shapes in the order of their first tasks."""
    shapes: dict[tuple[object, ...], list[Task]] = {}
    for task in tasks:
        shapes.setdefault((task.case.suite, *task.case.shape()), []).append(task)
    return list(shapes.values())


def longest_first(groups: Sequence[list[Task]]) -> list[list[Task]]:
    """Those that take longest first: begun last, they would run on when all else is done."""
    return sorted(groups, key=_cost, reverse=True)


def alone(case: Case) -> bool:
    """Whether a case's tensors are too many for any other to run beside it: candidate, reference
    and judge hold them on one device, and the inputs and two results stand in the host's memory."""
    return case.elements() > _ALONE_ELEMENTS


def _cost(group: Sequence[Task]) -> int:
    """Tensors are made, moved and judged element by element; the oracle's arithmetic, which has a
    limit, takes less than that."""
    shapes = 1 + _INTERPRETED_SHAPES * sum(_marked(task.case) for task in group)
    return shapes * _SHAPE_ELEMENTS + sum(task.case.elements() for task in group)


def _marked(case: Case) -> bool:
    """Whether an interpreter takes it by default."""
    offers = SUITES[case.suite].offers
    return any(str(case) in offer.marked for offer in offers if offer.marked)
