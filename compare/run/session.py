"""Cases one after the other: each one's inputs made once, its reference run once, every candidate
run and judged. What happens comes out as a stream of events, here or from a job's process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from compare.goldens.format import DamagedGolden, UnknownGolden
from compare.houses.torch_backend import torch_device
from compare.isolation.failures import sentence, verdict_of
from compare.isolation.worker import Isolated
from compare.protocol.case import Case
from compare.protocol.implementation import Implementation
from compare.protocol.inputs import Inputs, Result
from compare.protocol.verdict import Status, Verdict
from compare.run import registry
from compare.run.repeats import run_repeatedly
from compare.run.tasks import (
    Event,
    Finished,
    Options,
    Starting,
    Task,
    Unavailable,
    row_of,
    target_of,
)
from compare.suites.table import SUITES, make_inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """What a run compares. references: by suite; one missing means the oracle alone. by_name: the
    reference was asked for by name, so that its absence is a failure."""

    candidates: Sequence[Implementation]
    references: Mapping[str, Implementation]
    by_name: bool = False

    def isolated(self) -> Iterator[Isolated]:
        """Those that run in processes of their own."""
        for implementation in (*self.candidates, *self.references.values()):
            if isinstance(implementation, Isolated):
                yield implementation

    def close(self) -> None:
        """Ends their processes; a next call would start others."""
        for implementation in self.isolated():
            implementation.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reference:
    """The reference on one case. name: None where there is none. failed, note: why `result` is
    None, as a failure of the run or as a remark. damaged: its record is."""

    name: str | None = None
    result: Result | None = None
    failed: str | None = None
    note: str | None = None
    damaged: bool = False


class Session:
    """Runs tasks in this process."""

    def __init__(self, compared: Compared, options: Options) -> None:
        self._compared = compared
        self._options = options
        self._recorded: dict[str, list[Implementation]] = {}
        for implementation in compared.isolated():
            implementation.timeout = options.timeout

    def events(self, tasks: Iterable[Task]) -> Generator[Event]:
        """What happens, as it happens. Ctrl-C comes through at whatever point it strikes."""
        for task in tasks:
            yield from self._events(task)

    def _events(self, task: Task) -> Iterator[Event]:
        case, line = task.case, str(task.case)
        yield Starting(task.index, None, line)
        able: list[tuple[int, Implementation]] = []
        for place in task.candidates:
            candidate = self._compared.candidates[place]
            refusal = self._refusal(candidate, case)
            if refusal is None:
                able.append((place, candidate))
            else:
                row = row_of(case, candidate.name, target_of(candidate), refusal)
                yield Finished(task.index, place, row)
        if not able:
            return

        default = self._compared.references.get(case.suite)
        _prepare(case, [candidate for _, candidate in able], default)
        try:
            inputs = make_inputs(case)
        except MemoryError as error:
            yield Unavailable(f"{line}: this machine has no memory for its inputs ({error})")
            return
        except (DamagedGolden, UnknownGolden) as error:  # inputs that are stored with a result
            yield Unavailable(str(error))
            return
        reference = _Reference()
        if default is not None:
            yield Starting(task.index, None, f"{default.name} on {line}")
            reference = self._reference(default, case, inputs)
            if reference.damaged and reference.failed:
                yield Unavailable(reference.failed)
        evidence = SUITES[case.suite].evidence(inputs, partial(torch_device, self._options.device))
        for place, candidate in able:
            yield Starting(task.index, place, f"{candidate.name} on {line}")
            verdict, seconds = self._verdict(candidate, case, inputs, reference, evidence)
            row = row_of(
                case,
                candidate.name,
                target_of(candidate),
                verdict,
                reference=reference.name,
                seconds=seconds,
            )
            yield Finished(task.index, place, row)

    def _verdict(
        self,
        candidate: Implementation,
        case: Case,
        inputs: Inputs,
        reference: _Reference,
        evidence: Any,
    ) -> tuple[Verdict, float]:
        """Runs a candidate and judges it; the seconds of its call."""
        started = time.perf_counter()
        try:
            ran = run_repeatedly(candidate, inputs, self._options.repeat)
        except Exception as error:  # a candidate may fail in any way; the run goes on
            verdict, seconds = verdict_of(error), time.perf_counter() - started
        else:
            seconds = ran.seconds
            verdict = self._too_slow(candidate, ran.longest)
            if verdict is None:
                verdict = SUITES[case.suite].judge(
                    inputs,
                    ran.result,
                    reference.result,
                    profile=self._options.profile,
                    evidence=evidence,
                )
                verdict = _with_difference(verdict, ran.difference)
        if reference.failed and not verdict.reference_failed:
            verdict = dataclasses.replace(verdict, reference_failed=reference.failed)
        if reference.note:
            verdict = dataclasses.replace(verdict, notes=(*verdict.notes, reference.note))
        return verdict, seconds

    def _refusal(self, candidate: Implementation, case: Case) -> Verdict | None:
        try:
            reason = candidate.supports(case) or self._unmarked(candidate, case)
        except Exception as error:  # `supports` may be a user's own
            return verdict_of(error)
        return None if reason is None else Verdict(status=Status.UNSUPPORTED, reason=reason)

    def _unmarked(self, candidate: Implementation, case: Case) -> str | None:
        """Why a slow implementation isn't run on a case that nobody asked for by its line."""
        offer = SUITES[case.suite].offer(candidate.name)
        if offer is None or offer.marked is None or str(case) in offer.marked:
            return None
        if self._options.full or case in self._options.named:
            return None
        return "the interpreter takes the cases that the catalogue marks; --full all that it can"

    def _reference(self, default: Implementation, case: Case, inputs: Inputs) -> _Reference:
        """The result of the default reference, else that of the first recorded one that has the
        case."""
        reference = self._referred(default, case, inputs)
        for other in self._further(case, default) if reference.note else ():
            if other.supports(case) is None:
                return self._referred(other, case, inputs)
        return reference

    def _further(self, case: Case, reference: Implementation) -> list[Implementation]:
        """The recorded results that are asked where a default reference has nothing."""
        if case.suite not in self._recorded:
            names = registry.recorded_references(case.suite)
            self._recorded[case.suite] = [
                registry.find(name) for name in names if name != reference.name
            ]
        return self._recorded[case.suite]

    def _referred(self, reference: Implementation, case: Case, inputs: Inputs) -> _Reference:
        name = reference.name
        try:
            reason = reference.supports(case)
            if reason is None:
                return _Reference(name=name, result=reference.run(inputs))
        except DamagedGolden as error:
            return _Reference(name=name, failed=str(error), damaged=True)
        except NotImplementedError as error:
            reason = sentence(error)
        except Exception as error:  # a reference is an implementation like any other
            return _Reference(name=name, failed=sentence(error))
        if self._compared.by_name:
            return _Reference(name=name, failed=reason)
        return _Reference(note=f"judged without a reference: {reason}")

    def _too_slow(self, candidate: Implementation, seconds: float) -> Verdict | None:
        """A call in this process can't be ended from outside, but it is held to the same limit."""
        limit = self._options.timeout
        if limit is None or seconds <= limit or isinstance(candidate, Isolated):
            return None
        reason = f"it took {seconds:.1f} s and {limit:g} s are allowed"
        return Verdict(status=Status.TIMEOUT, reason=reason)


def _prepare(
    case: Case, candidates: Sequence[Implementation], reference: Implementation | None
) -> None:
    """Workers make the inputs of a case while this process makes its own."""
    for implementation in (*candidates, reference):
        if isinstance(implementation, Isolated):
            try:
                implementation.prepare(case)
            except Exception:  # run() meets the same failure and reports it
                continue


def _with_difference(verdict: Verdict, difference: str | None) -> Verdict:
    """A result that changes from run to run: the status where it is right, else a remark."""
    if difference is None:
        return verdict
    if verdict.status is Status.PASS:
        return dataclasses.replace(verdict, status=Status.NONDETERMINISTIC, reason=difference)
    return dataclasses.replace(verdict, notes=(*verdict.notes, difference))
