"""The protocol that every implementation follows, and the failures that it may raise."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from compare.protocol.case import Case
from compare.protocol.inputs import Inputs, Result


class UnknownImplementation(LookupError):
    """No implementation has this name; the message gives the nearest one, or what to write."""


class Unsupported(NotImplementedError):
    """An implementation can't serve these inputs; the message is the reason, in a sentence."""


class WorkerDied(RuntimeError):
    """The process that ran an implementation ended without an answer (status CRASH)."""


class TimedOut(RuntimeError):
    """An implementation took longer than --timeout (status TIMEOUT)."""


def warm_up(implementation: object) -> None:
    """Lets an implementation import what it needs, where it has a method of this name: neither the
    limit of a call nor its measured seconds are for imports."""
    ready = getattr(implementation, "warm_up", None)
    if ready is not None:
        ready()


class Distribution(NamedTuple):
    """The package that an implementation's results come from."""

    name: str
    version: str


def distribution(implementation: object) -> Distribution | None:
    """The package that an implementation adapts, where it has a method of this name that knows it;
    None of this project's own."""
    ask = getattr(implementation, "distribution", None)
    return None if ask is None else ask()


@runtime_checkable
class Implementation(Protocol):
    """Anything that can be compared.

    name: as written on the command line. suites: the suites that it serves.
    """

    @property
    def name(self) -> str: ...

    @property
    def suites(self) -> frozenset[str]: ...

    def supports(self, case: Case) -> str | None:
        """None, or the reason in a sentence why this case can't run here."""
        ...

    def run(self, inputs: Inputs) -> Result:
        """The result of one call. Raises Unsupported, or anything else as its own failure."""
        ...
