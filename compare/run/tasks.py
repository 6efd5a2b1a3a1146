"""What a run consists of: its options, the tasks that it is cut into, and what happens in it."""

from __future__ import annotations

import dataclasses

from compare.protocol.case import Case
from compare.protocol.implementation import Implementation
from compare.protocol.report import Row
from compare.protocol.verdict import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is to be done.

    profile: of tolerances: calibrated, flashmla or both. jobs: cases at the same time, each in a
    process of its own that finds its implementations by name; None: as many as help. timeout:
    seconds that one call of a candidate may take. device: of torch's and jax's computations: cpu,
    cuda or cuda:N. full: the interpreter takes all that it can. named: the cases that were asked
    for by their own lines, which it takes too. repeat: how often each candidate runs on each case;
    other bits than the first time are NONDETERMINISTIC.
    """

    profile: str = "calibrated"
    jobs: int | None = 1
    timeout: float | None = None
    device: str | None = None
    full: bool = False
    named: frozenset[Case] = frozenset()
    repeat: int = 1


DEFAULTS = Options()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One case and the places of the candidates that are to run on it."""

    index: int
    case: Case
    candidates: tuple[int, ...]


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


def target_of(implementation: Implementation) -> str:
    """The words that find an implementation: its name, where its author gave it no other."""
    return getattr(implementation, "target", implementation.name)


def row_of(
    case: Case,
    name: str,
    target: str,
    verdict: Verdict,
    *,
    reference: str | None = None,
    seconds: float = 0.0,
) -> Row:
    """The row of a candidate, found by `target` and called `name`, on a case."""
    return Row(
        case=str(case),
        candidate=name,
        reference=reference,
        verdict=verdict,
        seconds=seconds,
        target=None if target == name else target,
    )
