"""What can be tuned without changing what a kernel computes."""

from __future__ import annotations

import dataclasses

_REGISTERS_PER_THREAD = 504  # 64 Ki registers over three warpgroups, 128 threads each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning of the Hopper kernel; the defaults are what it is measured with.

    consumer_registers, producer_registers: a thread's share, after it has told which role it
      plays. Multiples of 8; two consumers and the producer must fit in 504. None: 232 and 40,
      or, for a producer that widens keys in its registers, 208 and 88.
    growth_limit: by how many powers of two a row may outgrow its reference maximum before the
      accumulator is rescaled. 0 rescales whenever the maximum moves. Bounds the weights by
      2**growth_limit, so it stays far from the float32 range.
    scores_behind_values: the even consumer starts a pair's first scores while the values of the
      pair before are still being added up; otherwise it gives their slot back first, which was
      faster in 10 of 13 measured batches.
    """

    consumer_registers: int | None = None
    producer_registers: int | None = None
    growth_limit: float = 8.0
    scores_behind_values: bool = False

    def __post_init__(self) -> None:
        if (self.consumer_registers is None) != (self.producer_registers is None):
            raise ValueError("consumer_registers and producer_registers must be given together")
        consumer, producer = self.registers_for(widened=False)
        if 2 * consumer + producer > _REGISTERS_PER_THREAD:
            raise ValueError(
                "consumer_registers twice and producer_registers must not exceed "
                f"{_REGISTERS_PER_THREAD} together; got {2 * consumer + producer}"
            )
        if not 0 <= self.growth_limit <= 64:
            raise ValueError(f"growth_limit must lie in [0, 64]; got {self.growth_limit}")

    def registers_for(self, *, widened: bool) -> tuple[int, int]:
        """Registers of a consumer's and of the producer's thread."""
        if self.consumer_registers is not None and self.producer_registers is not None:
            return self.consumer_registers, self.producer_registers
        return (208, 88) if widened else (232, 40)
