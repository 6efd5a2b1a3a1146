"""What can be tuned without changing a result."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jax_impl.mosaic.online_softmax import check_growth_limit
from jax_impl.mosaic.scratch import check_registers
from jax_impl.prefill.sparse.kernel_sm90.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning of the Hopper kernel; the defaults are what it is measured with.

    num_ctas: persistent thread blocks. One fits on an SM; an H200 has 132.
    consumer_registers, producer_registers: a thread's share, after it has told which role it
      plays. Multiples of 8; two consumers and the producer must fit in 504.
    growth_limit: by how many powers of two a row may outgrow its reference maximum before the
      accumulator is rescaled. 0 rescales whenever the maximum moves. Bounds the weights by
      2**growth_limit, so it stays far from the float32 range.
    gather_prefetch: L2 prefetch size of the gather ("128B", "256B", "" for none); None chooses
      by shape.
    row_prefetch: with several tiles to a token, ask L2 for the next pair's rows ahead of their
      copies, the request shared out among the tiles.
    """

    num_ctas: int = 132
    consumer_registers: int = 216
    producer_registers: int = 72
    growth_limit: float = 8.0
    gather_prefetch: str | None = None
    row_prefetch: bool = True

    def __post_init__(self) -> None:
        if self.num_ctas < 1:
            raise ValueError(f"num_ctas must be at least 1; got {self.num_ctas}")
        check_registers(self.consumer_registers, self.producer_registers)
        check_growth_limit(self.growth_limit)
        if self.gather_prefetch not in (None, "", "64B", "128B", "256B"):
            raise ValueError(
                "gather_prefetch must be None, '', '64B', '128B' or '256B'; "
                f"got {self.gather_prefetch!r}"
            )

    @classmethod
    def for_device(cls, device: Any) -> Self:
        """One thread block per SM of a jax.Device, if it says how many it has."""
        return cls(num_ctas=getattr(device, "core_count", None) or cls.num_ctas)

    def ctas_for(self, problem: Problem) -> int:
        return min(self.num_ctas, problem.num_tiles)

    def gather_prefetch_for(self, problem: Problem) -> str:
        """The L2 prefetch size, chosen by shape unless it is set.

        A row of 1152 bytes may start in the middle of a 256-byte sector pair; fetching whole
        pairs drags in a part of the neighbouring row, which pays only if a second tile is
        about to read the same keys.
        """
        if self.gather_prefetch is not None:
            return self.gather_prefetch
        return "128B" if problem.d_qk == 576 and problem.head_tiles == 1 else "256B"

    def prefetches_rows(self, problem: Problem) -> bool:
        """Whether it pays to ask for rows ahead: alone, a tile would double its L2 requests."""
        return self.row_prefetch and problem.head_tiles > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedConfig(Config):
    """Tuning where the producer widens pages of float8 tokens.

    part_tiles: how many 64-column tiles of a block's side are loaded, and stored, at a time: 1,
      2 or 4.
    early_tiles: how many of a side's tiles of codes (four on the left, three on the right) are
      asked for before the side ahead of it is stored; the others as registers become free, of
      which a tile takes 8.
    row_prefetch_alone: ask L2 for the next pair's keys also where a token has one tile only.
    """

    consumer_registers: int = 200
    producer_registers: int = 104
    part_tiles: int = 1
    early_tiles: int = 4
    row_prefetch_alone: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part_tiles not in (1, 2, 4):
            raise ValueError(f"part_tiles must be 1, 2 or 4; got {self.part_tiles}")
        if self.early_tiles not in range(0, 5, self.part_tiles):
            raise ValueError(
                f"early_tiles must be a multiple of part_tiles = {self.part_tiles} between 0 and "
                f"4; got {self.early_tiles}"
            )

    def gather_prefetch_for(self, problem: Problem) -> str:
        """The L2 prefetch size of the loads: none unless it is set."""
        return self.gather_prefetch or ""

    def prefetches_rows(self, problem: Problem) -> bool:
        return self.row_prefetch and (problem.head_tiles > 1 or self.row_prefetch_alone)
