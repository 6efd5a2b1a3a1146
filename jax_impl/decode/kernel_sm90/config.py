"""What can be tuned without changing what a kernel computes."""

from __future__ import annotations

import dataclasses

_REGISTERS_PER_THREAD = 504  # 64 Ki registers over three warpgroups, 128 threads each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning of the Hopper kernel; the defaults are what it is measured with.

    consumer_registers, producer_registers: a thread's share, after it has told which role it
      plays. Multiples of 8; two consumers and the producer must fit in 504.
    growth_limit: by how many powers of two a row may outgrow its reference maximum before the
      accumulator is rescaled. 0 rescales whenever the maximum moves. Bounds the weights by
      2**growth_limit, so it stays far from the float32 range.
    scores_behind_values: the even consumer starts a pair's first scores while the values of the
      pair before are still being added up; otherwise it gives their slot back first.
    """

    consumer_registers: int = 232
    producer_registers: int = 40
    growth_limit: float = 8.0
    scores_behind_values: bool = True

    def __post_init__(self) -> None:
        registers = 2 * self.consumer_registers + self.producer_registers
        if registers > _REGISTERS_PER_THREAD:
            raise ValueError(
                "consumer_registers twice and producer_registers must not exceed "
                f"{_REGISTERS_PER_THREAD} together; got {registers}"
            )
        if not 0 <= self.growth_limit <= 64:
            raise ValueError(f"growth_limit must lie in [0, 64]; got {self.growth_limit}")
