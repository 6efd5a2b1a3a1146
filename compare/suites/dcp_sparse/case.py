"""The case line of the suite ``dcp-sparse``: attention over chosen keys that are spread over DCP
ranks, every rank run and all of them merged.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from compare.generate.decode_batch import check_batch
from compare.protocol.case import Case, CaseError, case_field, integer, integers, word

WIDTH = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcpSparseCase(Case):
    """Keys of ``dcp-sparse:...`` (all lengths in tokens).

    lens, q: keys of each request on all ranks together, this step's tokens included, and its query
        tokens; a request may have none of either, and fewer keys than tokens.
    h, topk, page: query heads H, columns K of a token's list, page size P.
    world, interleave: of the group.
    data: normal, or exact (P is 0 or 1 on all ranks together).
    seed: of the Philox streams.
    A token chooses as many of the keys that it sees as its list holds. Keys that no token chose,
    slots past a request's keys and pages that no request has are NaN.
    """

    suite: ClassVar[str] = "dcp-sparse"

    lens: tuple[int, ...] = case_field((), integers(0))
    q: tuple[int, ...] = case_field((), integers(0))
    h: int = case_field(16, integer(1, 128))
    topk: int = case_field(64, integer(1))
    page: int = case_field(64, integer(1))
    world: int = case_field(2, integer(1))
    interleave: int = case_field(1, integer(1))
    data: str = case_field("normal", word("normal", "exact"))
    seed: int = case_field(0, integer(0, 2**32 - 1))

    @property
    def scale(self) -> float:
        """sm_scale."""
        return WIDTH**-0.5

    def shape(self) -> tuple[object, ...]:
        return (self.lens, sum(self.q), self.h, self.topk, self.page, self.world)

    def elements(self) -> int:
        rows = sum(self.q) * self.h * 2 * WIDTH
        return self.world * rows + 2 * sum(self.lens) * WIDTH

    def check(self) -> None:
        check_batch(self.suite, self.lens, self.q, max((0, *self.q)), self.world, "all")
        if self.page % self.interleave:
            raise CaseError(
                f"dcp-sparse: interleave={self.interleave} doesn't divide page={self.page}; "
                "a run of keys mustn't lie on two pages"
            )
