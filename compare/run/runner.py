"""A whole run: candidates on cases against a reference, as a Report."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from compare.houses.jax_backend import INTERPRETERS
from compare.protocol.case import Case
from compare.protocol.implementation import Implementation
from compare.protocol.report import Report, Row
from compare.run import registry
from compare.run.interruption import work_is_over
from compare.run.order import alone, variety_first
from compare.run.session import (
    INTERPRETER_SECONDS,
    Event,
    Finished,
    Options,
    Session,
    Starting,
    Task,
    Unavailable,
)

Progress = Callable[[int, int, str], None]
"""progress(done, total, what): called whenever a step begins or ends."""


def run(
    cases: Sequence[Case],
    candidates: Sequence[Implementation | str] | None,
    reference: Implementation | str | None,
    *,
    profile: str = "calibrated",
    jobs: int = 1,
    timeout: float | None = None,
    device: str | None = None,
    full: bool = False,
    progress: Progress | None = None,
    repeat: int = 1,
) -> Report:
    """Runs every candidate on every case of its suites and judges it.

    cases: in the order of the report. candidates: names or implementations; None: for each suite
    what `registry.here` gives. A candidate has rows for the cases of its own suites; a case that
    none of them serves is UNSUPPORTED for each. reference: a name or an implementation, "oracle"
    for the oracle alone, None: for each suite `registry.default_reference`, and where that has
    nothing for a case, the oracle alone. One that was asked for and has nothing is a failed one.
    profile: calibrated, flashmla or both. jobs: cases at the same time, each in a process of its
    own that finds its implementations by name. timeout: seconds for one call of an implementation.
    device: cpu, cuda or cuda:N. full: no limit on the interpreter's time. repeat: how often each
    candidate runs on each case; other bits than the first time are NONDETERMINISTIC.

    Ctrl-C, at any moment, ends the run with a Report of what was finished; so do SIGTERM and SIGHUP
    inside `interruption.signals_end_in_order`. UnknownImplementation
    for a name that isn't there; ValueError for jobs > 1 with what has no name to be found by.
    """
    started = time.monotonic()
    suites = list(dict.fromkeys(case.suite for case in cases))
    chosen = _candidates(candidates, suites, device)
    references = _references(reference, suites, device)
    options = Options(
        profile=profile,
        timeout=timeout,
        device=device,
        interpreter_seconds=None if full else INTERPRETER_SECONDS,
        repeat=repeat,
        strict=frozenset() if reference is None else frozenset(references),
    )
    unavailable = []
    if candidates is not None:
        unavailable += [s for c in chosen if (s := _unavailable(c)) is not None]
    if reference is not None:
        unavailable += [s for r in references.values() if (s := _unavailable(r)) is not None]
    if reference not in (None, registry.ORACLE) and suites and not references:
        name = reference if isinstance(reference, str) else reference.name
        unavailable.append(f"{name}: the reference isn't for {' or '.join(suites)}")
    tasks = _in_order(_tasks(cases, chosen), chosen, options)
    total = sum(len(task.candidates) for task in tasks)
    rows: dict[tuple[int, int], Row] = {}
    interrupted = False
    environment: dict[str, str] = {}
    session = Session(chosen, references, options)
    events = _events(session, tasks, chosen, references, options, jobs)
    try:
        environment = _environment()
        for event in events:
            match event:
                case Finished(index, place, row):
                    rows[index, place] = row
                    what = f"{row.candidate} on {row.case}"
                case Starting(_, _, what):
                    pass
                case Unavailable(what):
                    unavailable.append(what)
            if progress is not None:
                progress(len(rows), total, what)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        work_is_over()
        events.close()
        session.close()
    return Report(
        rows=tuple(rows[key] for key in sorted(rows)),
        environment=environment,
        profile=profile,
        unavailable=tuple(dict.fromkeys(unavailable)),
        interrupted=interrupted,
        seconds=time.monotonic() - started,
    )


def _events(
    session: Session,
    tasks: Sequence[Task],
    candidates: Sequence[Implementation],
    references: dict[str, Implementation],
    options: Options,
    jobs: int,
) -> Generator[Event]:
    if jobs <= 1 or len(tasks) <= 1:
        return session.events(tasks)
    from compare.run.jobs import parallel_events

    targets = [_target(candidate) for candidate in candidates]
    named = {suite: _target(found) for suite, found in references.items()}
    session.close()  # each job has workers of its own
    names = [candidate.name for candidate in candidates]

    def begin(tasks: Sequence[Task], jobs: int) -> Generator[Event]:
        return parallel_events(tasks, targets, names, named, options, jobs)

    def events() -> Generator[Event]:
        beside = [task for task in tasks if not alone(task.case)]
        if beside:
            yield from begin(beside, jobs)
        for task in tasks:
            if alone(task.case):  # in a process of its own, which takes its memory with it
                yield from begin([task], 1)

    return events()


def _candidates(
    given: Sequence[Implementation | str] | None, suites: Sequence[str], device: str | None
) -> list[Implementation]:
    if given is None:
        given = list(dict.fromkeys(name for s in suites for name in registry.here(s, device)))
    return [registry.find(c, device) if isinstance(c, str) else c for c in given]


def _references(
    given: Implementation | str | None, suites: Sequence[str], device: str | None
) -> dict[str, Implementation]:
    """The reference of each suite; no entry where the oracle is alone."""
    if given == registry.ORACLE:
        return {}
    if isinstance(given, str):
        given = registry.find(given, device)
    if given is not None:
        return {suite: given for suite in suites if suite in given.suites}
    defaults = {suite: registry.default_reference(suite, device) for suite in suites}
    return {suite: registry.find(n, device) for suite, n in defaults.items() if n is not None}


def _tasks(cases: Sequence[Case], candidates: Sequence[Implementation]) -> list[Task]:
    places: dict[str, tuple[int, ...]] = {}
    for suite in {case.suite for case in cases}:
        serving = tuple(i for i, c in enumerate(candidates) if suite in c.suites)
        places[suite] = serving or tuple(range(len(candidates)))
    return [
        Task(index=index, case=case, candidates=places[case.suite])
        for index, case in enumerate(cases)
    ]


def _in_order(
    tasks: Sequence[Task], candidates: Sequence[Implementation], options: Options
) -> Sequence[Task]:
    """Where the interpreter has a limit, its time goes to a variety of cases."""
    interpreters = [c for c in candidates if c.name in INTERPRETERS]
    if not interpreters or options.interpreter_seconds is None:
        return tasks
    return variety_first(
        tasks, lambda case: any(found.supports(case) is None for found in interpreters)
    )


def _unavailable(implementation: Implementation) -> str | None:
    """Why it can't run on this machine at all, for one that was asked for by name."""
    ask = getattr(implementation, "unavailable", None)
    reason = None if ask is None else ask()
    return None if reason is None else f"{implementation.name}: {reason}"


def _target(implementation: Implementation) -> str:
    """The name by which another process finds the same implementation."""
    target = getattr(implementation, "target", implementation.name)
    if target in registry.names() or hasattr(implementation, "target"):
        return target
    raise ValueError(
        f"{implementation.name} is an object of this process; with jobs > 1 implementations are "
        "found by name (MODULE:FUNCTION or FILE.py:FUNCTION)"
    )


def _environment() -> dict[str, str]:
    from compare.report.environment import environment

    return environment()
