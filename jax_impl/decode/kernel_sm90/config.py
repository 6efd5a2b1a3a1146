"""What can be tuned without changing what a kernel computes."""

from __future__ import annotations

import dataclasses

from jax_impl.mosaic.online_softmax import check_growth_limit
from jax_impl.mosaic.scratch import check_registers


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
        check_registers(*self.registers_for(widened=False))
        check_growth_limit(self.growth_limit)

    def registers_for(self, *, widened: bool) -> tuple[int, int]:
        """Registers of a consumer's and of the producer's thread."""
        if self.consumer_registers is not None and self.producer_registers is not None:
            return self.consumer_registers, self.producer_registers
        return (208, 88) if widened else (232, 40)
