"""A whole run: candidates on cases against a reference, as a Report."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from compare.protocol.case import Case
from compare.protocol.implementation import Implementation
from compare.protocol.report import Report, Row
from compare.run import registry
from compare.run.interruption import work_is_over
from compare.run.jobs import Jobs
from compare.run.schedule import helpful_jobs
from compare.run.session import Compared, Session
from compare.run.tasks import DEFAULTS, Event, Finished, Options, Starting, Task, Unavailable

Progress = Callable[[int, int, str], None]
"""progress(done, total, what): called whenever a step begins or ends."""


def run(
    cases: Sequence[Case],
    candidates: Sequence[Implementation | str] | None,
    reference: Implementation | str | None,
    options: Options = DEFAULTS,
    *,
    progress: Progress | None = None,
) -> Report:
    """Runs every candidate on every case of its suites and judges it.

    cases: in the order of the report. candidates: names or implementations; None: for each suite
    what `registry.here` gives. A candidate has rows for the cases of its own suites; a case that
    none of them serves is UNSUPPORTED for each. reference: a name or an implementation, "oracle"
    for the oracle alone, None: for each suite `registry.default_reference`, and where that has
    nothing for a case, the oracle alone. One that was asked for and has nothing is a failed one.

    Ctrl-C, at any moment, ends the run with a Report of what was finished; so do SIGTERM and SIGHUP
    inside `interruption.signals_end_in_order`. UnknownImplementation
    for a name that isn't there; ValueError for jobs > 1 with what has no name to be found by.
    """
    started = time.monotonic()
    jobs = Jobs(helpful_jobs(cases, candidates) if options.jobs is None else options.jobs)
    rows: dict[tuple[int, int], Row] = {}
    interrupted = False
    environment: dict[str, str] = {}
    try:
        jobs.start(len(cases))  # they import torch and jax while this process does
        suites = list(dict.fromkeys(case.suite for case in cases))
        compared, unavailable = _compared(candidates, reference, suites, options.device, jobs)
        tasks = _tasks(cases, compared.candidates)
        total = sum(len(task.candidates) for task in tasks)
        events = _events(tasks, compared, options, jobs)
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
            compared.close()
    finally:
        jobs.close()
    return Report(
        rows=tuple(rows[key] for key in sorted(rows)),
        environment=environment,
        profile=options.profile,
        unavailable=tuple(dict.fromkeys(unavailable)),
        interrupted=interrupted,
        seconds=time.monotonic() - started,
    )


def _events(
    tasks: Sequence[Task], compared: Compared, options: Options, jobs: Jobs
) -> Generator[Event]:
    if jobs.count <= 1 or len(tasks) <= 1:
        return Session(compared, options).events(tasks)
    return jobs.events(tasks, compared, options)


def _compared(
    candidates: Sequence[Implementation | str] | None,
    reference: Implementation | str | None,
    suites: Sequence[str],
    device: str | None,
    jobs: Jobs,
) -> tuple[Compared, list[str]]:
    """What is to be compared, and a sentence for each that was asked for and can't run here."""
    names = candidates
    if names is None:
        names = jobs.ask(registry.default_candidates, suites, device)
    chosen = [registry.find(c, device) if isinstance(c, str) else c for c in names]
    if reference is None:
        defaults = jobs.ask(registry.default_references, suites, device)
        references = {suite: registry.find(name, device) for suite, name in defaults.items()}
    elif reference == registry.ORACLE:
        references = {}
    else:
        named = registry.find(reference, device) if isinstance(reference, str) else reference
        references = {suite: named for suite in suites if suite in named.suites}
    asked = [] if candidates is None else list(chosen)
    if reference is not None:
        asked += references.values()
    unavailable = [sentence for i in asked if (sentence := _unavailable(i)) is not None]
    if reference not in (None, registry.ORACLE) and suites and not references:
        name = reference if isinstance(reference, str) else reference.name
        unavailable.append(f"{name}: the reference isn't for {' or '.join(suites)}")
    compared = Compared(candidates=chosen, references=references, by_name=reference is not None)
    return compared, unavailable


def _tasks(cases: Sequence[Case], candidates: Sequence[Implementation]) -> list[Task]:
    places: dict[str, tuple[int, ...]] = {}
    for suite in {case.suite for case in cases}:
        serving = tuple(i for i, c in enumerate(candidates) if suite in c.suites)
        places[suite] = serving or tuple(range(len(candidates)))
    return [
        Task(index=index, case=case, candidates=places[case.suite])
        for index, case in enumerate(cases)
    ]


def _unavailable(implementation: Implementation) -> str | None:
    """Why it can't run on this machine at all, for one that was asked for by name."""
    ask = getattr(implementation, "unavailable", None)
    reason = None if ask is None else ask()
    return None if reason is None else f"{implementation.name}: {reason}"


def _environment() -> dict[str, str]:
    from compare.report.environment import environment

    return environment()
