"""Time of one launch among many back to back, of several contenders in one run.

A clock around a single launch also measures what happens once: the launch gap, the wait at the end,
the clock rate of an idle GPU. Two batches of different sizes have that in common, so that their
difference is the time of the launches that one has more: (t(n2) - t(n1)) / (n2 - n1). Contenders
take turns, since a GPU under load changes its clock by several percent within seconds.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to be timed. launch(n): enqueues n launches back to back and waits for the last."""

    name: str
    launch: Callable[[int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How often. Each round times batches of `few` and of few + `launches` launches of each
    contender.
    """

    launches: int = 20
    few: int = 4
    rounds: int = 5

    def __post_init__(self) -> None:
        for name in ("launches", "few", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted are 1 and more")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one launch, in each round; a disturbed round may even be negative."""

    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.rounds_us)

    @property
    def measurable(self) -> bool:
        """Whether the launches take longer than the clock's noise: most rounds have a time."""
        return self.median_us > 0

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the rounds."""
        return (max(self.rounds_us) - min(self.rounds_us)) / self.median_us


def interleaved(
    contenders: Sequence[Contender],
    method: Method,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """The time of each contender by its name; in every round another one begins. clock: seconds."""
    for contender in contenders:
        contender.launch(method.few)  # caches, clocks and allocators as they are under load
    rounds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(method.rounds):
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            few = _seconds(contender, method.few, clock)
            many = _seconds(contender, method.few + method.launches, clock)
            rounds[contender.name].append((many - few) / method.launches * 1e6)
    return {name: Timing(tuple(times)) for name, times in rounds.items()}


def _seconds(contender: Contender, launches: int, clock: Callable[[], float]) -> float:
    started = clock()
    contender.launch(launches)
    return clock() - started
