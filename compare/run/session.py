"""Cases one after the other: each one's inputs made once, its reference run once, every candidate
run and judged. What happens comes out as a stream of events, here or from a job's process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from compare.goldens.format import DamagedGolden, UnknownGolden
from compare.houses.jax_backend import INTERPRETERS
from compare.houses.torch_backend import torch_device
from compare.isolation.failures import sentence, verdict_of
from compare.isolation.worker import Isolated
from compare.protocol.case import Case
from compare.protocol.implementation import Implementation
from compare.protocol.inputs import Inputs, Result
from compare.protocol.report import Row
from compare.protocol.suite import Suite
from compare.protocol.verdict import Status, Verdict
from compare.run.repeats import run_repeatedly
from compare.suites.table import SUITES, make_inputs

INTERPRETER_SECONDS = 60.0
"""What a run spends on the interpreter in all, unless it is asked for everything."""


@dataclasses.dataclass(frozen=True)
class Starting:
    """Work on a case begins; candidate: its place among the candidates, None for what all share."""

    case: int
    candidate: int | None
    what: str


@dataclasses.dataclass(frozen=True)
class Finished:
    """One candidate on one case is done."""

    case: int
    candidate: int
    row: Row


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """Something asked for isn't there or is damaged, in a sentence."""

    sentence: str


Event = Starting | Finished | Unavailable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """profile: of tolerances. timeout: seconds that one call of a candidate may take. device: of
    torch's and jax's computations. interpreter_seconds: for the interpreter in all, None: any.
    repeat: how often each candidate runs on each case. strict: the suites whose reference was asked
    for by name, so that its absence is a failure."""

    profile: str = "calibrated"
    timeout: float | None = None
    device: str | None = None
    interpreter_seconds: float | None = INTERPRETER_SECONDS
    repeat: int = 1
    strict: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One case and the places of the candidates that are to run on it."""

    index: int
    case: Case
    candidates: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reference:
    """The reference on one case. name: None where there is none. failed, note: why `result` is
    None, as a failure of the run or as a remark."""

    name: str | None = None
    result: Result | None = None
    failed: str | None = None
    note: str | None = None


class Session:
    """Runs tasks in this process. references: by suite; one missing means the oracle alone."""

    def __init__(
        self,
        candidates: Sequence[Implementation],
        references: Mapping[str, Implementation],
        options: Options,
    ) -> None:
        self._candidates = candidates
        self._references = references
        self._options = options
        self._interpreted = 0.0
        self._recorded: dict[str, list[Implementation]] = {}
        for implementation in candidates:
            if isinstance(implementation, Isolated):
                implementation.timeout = options.timeout
        for reference in references.values():
            if isinstance(reference, Isolated):
                reference.timeout = options.timeout

    def events(self, tasks: Iterable[Task]) -> Generator[Event]:
        """What happens, as it happens. Ctrl-C comes through at whatever point it strikes."""
        for task in tasks:
            yield from self._case(task)

    def close(self) -> None:
        """Ends the workers."""
        for implementation in (*self._candidates, *self._references.values()):
            if isinstance(implementation, Isolated):
                implementation.close()

    def _case(self, task: Task) -> Iterator[Event]:
        case, line = task.case, str(task.case)
        yield Starting(task.index, None, line)
        able = []
        for place in task.candidates:
            refused = self._refusal(self._candidates[place], case)
            if refused is None:
                able.append(place)
                continue
            row = Row(
                case=line,
                candidate=self._candidates[place].name,
                reference=None,
                verdict=refused,
                seconds=0.0,
                target=_target(self._candidates[place]),
            )
            yield Finished(task.index, place, row)
        if not able:
            return

        reference = self._references.get(case.suite)
        self._prepare(case, [self._candidates[place] for place in able], reference)
        try:
            inputs = make_inputs(case)
        except MemoryError as error:
            yield Unavailable(f"{line}: this machine has no memory for its inputs ({error})")
            return
        except (DamagedGolden, UnknownGolden) as error:  # inputs that are stored with a result
            yield Unavailable(str(error))
            return
        found = _Reference()
        if reference is not None:
            yield Starting(task.index, None, f"{reference.name} on {line}")
            found, damaged = self._refer(reference, case, inputs)
            for other in self._further(case, reference) if found.note else ():
                if other.supports(case) is None:
                    found, damaged = self._refer(other, case, inputs)
                    break
            if damaged:
                yield Unavailable(damaged)
        suite = SUITES[case.suite]
        evidence = suite.evidence(inputs, partial(torch_device, self._options.device))
        for place in able:
            candidate = self._candidates[place]
            yield Starting(task.index, place, f"{candidate.name} on {line}")
            row = self._row(candidate, line, inputs, found, suite, evidence)
            yield Finished(task.index, place, row)

    def _row(
        self,
        candidate: Implementation,
        line: str,
        inputs: Inputs,
        reference: _Reference,
        suite: Suite,
        evidence: Any,
    ) -> Row:
        started = time.perf_counter()
        try:
            ran = run_repeatedly(candidate, inputs, self._options.repeat)
        except Exception as error:  # a candidate may fail in any way; the run goes on
            verdict, seconds = verdict_of(error), time.perf_counter() - started
        else:
            seconds = ran.seconds
            verdict = self._too_slow(candidate, ran.longest)
            if verdict is None:
                verdict = suite.judge(
                    inputs,
                    ran.result,
                    reference.result,
                    profile=self._options.profile,
                    evidence=evidence,
                )
                verdict = _with_difference(verdict, ran.difference)
        if candidate.name in INTERPRETERS:
            self._interpreted += seconds
        if reference.failed and not verdict.reference_failed:
            verdict = dataclasses.replace(verdict, reference_failed=reference.failed)
        if reference.note:
            verdict = dataclasses.replace(verdict, notes=(*verdict.notes, reference.note))
        name = reference.name if reference.result is not None or reference.failed else None
        return Row(
            case=line,
            candidate=candidate.name,
            reference=name,
            verdict=verdict,
            seconds=seconds,
            target=_target(candidate),
        )

    def _refusal(self, candidate: Implementation, case: Case) -> Verdict | None:
        try:
            reason = candidate.supports(case)
        except Exception as error:  # `supports` may be a user's own
            return verdict_of(error)
        limit = self._options.interpreter_seconds
        if (
            reason is None
            and candidate.name in INTERPRETERS
            and limit is not None
            and self._interpreted >= limit
        ):
            reason = (
                f"the {limit:.0f} s that a run gives the interpreter are used up; "
                "--full lifts this limit"
            )
        return None if reason is None else Verdict(status=Status.UNSUPPORTED, reason=reason)

    def _prepare(
        self, case: Case, candidates: Sequence[Implementation], reference: Implementation | None
    ) -> None:
        """Workers make the inputs of a case while this process makes its own."""
        for implementation in (*candidates, reference):
            if isinstance(implementation, Isolated):
                try:
                    implementation.prepare(case)
                except Exception:  # run() meets the same failure and reports it
                    continue

    def _further(self, case: Case, reference: Implementation) -> list[Implementation]:
        """The recorded results that are asked where a default reference has nothing."""
        from compare.run import registry

        if case.suite not in self._recorded:
            names = registry.recorded_references(case.suite)
            self._recorded[case.suite] = [
                registry.find(name) for name in names if name != reference.name
            ]
        return self._recorded[case.suite]

    def _refer(
        self, reference: Implementation, case: Case, inputs: Inputs
    ) -> tuple[_Reference, str | None]:
        """The reference's result, and a sentence where a record of it is damaged."""
        name = reference.name
        try:
            reason = reference.supports(case)
            if reason is None:
                return _Reference(name=name, result=reference.run(inputs)), None
        except DamagedGolden as error:
            return _Reference(name=name, failed=str(error)), str(error)
        except NotImplementedError as error:
            reason = sentence(error)
        except Exception as error:  # a reference is an implementation like any other
            return _Reference(name=name, failed=sentence(error)), None
        if case.suite in self._options.strict:
            return _Reference(name=name, failed=reason), None
        return _Reference(note=f"judged without a reference: {reason}"), None

    def _too_slow(self, candidate: Implementation, seconds: float) -> Verdict | None:
        """A call in this process can't be ended from outside, but it is held to the same limit."""
        limit = self._options.timeout
        if limit is None or seconds <= limit or isinstance(candidate, Isolated):
            return None
        reason = f"it took {seconds:.1f} s and {limit:g} s are allowed"
        return Verdict(status=Status.TIMEOUT, reason=reason)


def _target(candidate: Implementation) -> str | None:
    """The words that find a candidate, where they aren't its name."""
    target = getattr(candidate, "target", None)
    return None if target == candidate.name else target


def _with_difference(verdict: Verdict, difference: str | None) -> Verdict:
    """A result that changes from run to run: the status where it is right, else a remark."""
    if difference is None:
        return verdict
    if verdict.status is Status.PASS:
        return dataclasses.replace(verdict, status=Status.NONDETERMINISTIC, reason=difference)
    return dataclasses.replace(verdict, notes=(*verdict.notes, difference))
