"""What a suite is: how its cases are read, made, judged and run."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from compare.protocol.case import Case
from compare.protocol.implementation import Implementation
from compare.protocol.inputs import Inputs, Result
from compare.protocol.records import Records
from compare.protocol.signature import Signature
from compare.protocol.timing import Bench
from compare.protocol.verdict import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """An implementation of one suite under the name by which the command line finds it.

    make: MODULE:CALLABLE, imported when it is first asked for, since torch and jax take seconds.
    It is called with (name, device), device None, cpu, cuda or cuda:N, and with `options`.
    what: a few words for `list` and `doctor`; a name that several suites offer has them from the
    first. isolated: it runs in a process of its own, since a fault in a GPU kernel would take the
    judge's own context with it. stands_in_for: the name beside which a run that names no candidate
    leaves it out. marked: where it is slow, the case lines of its suite that it runs unless all are
    asked for; None: all that it supports.
    """

    name: str
    make: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    what: str = ""
    isolated: bool = False
    stands_in_for: str | None = None
    marked: tuple[str, ...] | None = None

    def implementation(self, device: str | None) -> Implementation:
        """The implementation, built in this process."""
        return lookup(self.make)(self.name, device, **self.options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite; `compare.suites.table` has them all.

    signature: what its implementations are given and give back. make_inputs: Case -> Inputs, always
    the same bytes on every machine. lines: its case lines, given whether all of them are wanted or
    those of a default run. judging: the module that has
    judge(inputs, candidate, reference, *, profile, evidence) and, where evidence is worth sharing
    among candidates, evidence_of(inputs, device).
    faults: the module of its table of known faults, which has faults_of(evidence); None: it has
    none. calibration: the module whose CALIBRATION says how its judge's bounds are measured.
    timing: the module whose BENCH says how it is timed; None: it isn't.
    offers: its implementations. candidates: the names that a run takes which names none, in this
    order, as far as they can run. references: the names that such a run compares with, the first
    one that is there; none: the oracle alone. records: how its results are recorded; None: they
    aren't. plan_command: the command that sets its shipped and its fixed plan beside one another,
    by what MODULE:FUNCTION, `explaining`, says of them.
    """

    name: str
    case_type: type[Case]
    signature: Signature[Any, Any]
    make_inputs: Callable[[Any], Inputs]
    lines: Callable[[bool], list[str]]
    judging: str
    offers: tuple[Offer, ...]
    candidates: tuple[str, ...]
    references: tuple[str, ...] = ()
    records: Records | None = None
    faults: str | None = None
    calibration: str | None = None
    timing: str | None = None
    plan_command: str | None = None
    explaining: str | None = None

    @property
    def inputs_type(self) -> type[Inputs]:
        """What its implementations are given."""
        return self.signature.inputs_type

    def explain(self, *arguments: Any) -> Any:
        """The shipped and the fixed plan of a batch, judged; see the function itself."""
        assert self.explaining is not None
        return lookup(self.explaining)(*arguments)

    def offer(self, name: str) -> Offer | None:
        """What it offers under a name."""
        return next((offer for offer in self.offers if offer.name == name), None)

    def bench(self) -> Bench | None:
        """How it is timed; None: it isn't."""
        return None if self.timing is None else importlib.import_module(self.timing).BENCH

    def evidence(self, inputs: Inputs, device: Callable[[], str]) -> Any:
        """What the judge shares among the candidates of one case; None where there is nothing.
        device: gives torch's name of where it computes, asked only where there is evidence."""
        make = getattr(importlib.import_module(self.judging), "evidence_of", None)
        return None if make is None else make(inputs, device())

    def judge(
        self,
        inputs: Inputs,
        candidate: Result,
        reference: Result | None = None,
        *,
        profile: str = "calibrated",
        evidence: Any = None,
    ) -> Verdict:
        """The verdict on a candidate's result; the suite's judge says what it raises."""
        judge = importlib.import_module(self.judging).judge
        return judge(inputs, candidate, reference, profile=profile, evidence=evidence)


def lookup(word: str) -> Any:
    """The object that MODULE:NAME names."""
    module, _, name = word.partition(":")
    return getattr(importlib.import_module(module), name)
