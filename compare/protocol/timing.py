"""What is timed: a call made ready for many launches, and what a suite says about its bench."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from compare.protocol.implementation import Implementation
from compare.protocol.inputs import Inputs, Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A call whose data lie on the device, planned and compiled.

    once(): its result. launch(n): enqueues n launches back to back and waits for the last. program:
    XLA's executable, where there is one.
    """

    once: Callable[[], Result]
    launch: Callable[[int], None]
    program: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """A contender that moves bytes and computes next to nothing: it has bytes a second, no ratio.
    bytes_read, bytes_written: what it has to move, by the formats.
    """

    prepare: Callable[[], Launch]
    bytes_read: int
    bytes_written: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """Bytes that a contender may need beside its arguments: the workspace of the largest chunk, its
    lists, and the results."""

    workspace: int
    lists: int
    results: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """How a suite is timed.

    lines: the cases that a bench takes which names none. against: names of its references, the
    first has to run. flop: multiply-adds times two that the inputs ask for. oracle(inputs, tokens,
    device): float64 out [n, H, 512] and lse [n, H] of some tokens, torch tensors. facts: what the
    measurement's method says besides. config: MODULE:CLASS of the kernel's tuning, whose instance
    the implementation "pallas" takes as `config`; None: it has none.
    parts(inputs, backend, device): contenders by name that are parts of a backend's whole path.
    transfers: likewise. planned(inputs, implementation): what memory it may need, of suites whose
    memory is measured. same_bits: all contenders that are programs of JAX give the same bits.
    """

    lines: tuple[str, ...]
    against: tuple[str, ...]
    flop: Callable[[Any], float]
    oracle: Callable[[Any, Any, str], tuple[Any, Any]]
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    redundant: Callable[[Any], tuple[str, ...]] = lambda inputs: ()
    config: str | None = None
    parts: Callable[[Any, str, str | None], dict[str, Callable[[], Launch]]] | None = None
    transfers: Callable[[Any, str, str | None], dict[str, Transfer]] | None = None
    planned: Callable[[Any, Implementation], Planned] | None = None
    same_bits: bool = False


def prepare(implementation: Implementation, inputs: Inputs) -> Launch:
    """The call made ready. NotImplementedError where the implementation can't be timed."""
    ready = getattr(implementation, "prepare", None)
    if ready is None:
        raise NotImplementedError(f"{implementation.name} doesn't say how it is timed")
    return ready(inputs)
