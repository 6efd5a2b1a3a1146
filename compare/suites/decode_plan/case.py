"""The case line of the suite ``decode-plan``: one decode batch whose rows are to be planned."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from compare.generate.decode_batch import check_batch
from compare.protocol.case import Case, CaseError, case_field, flag, integer, integer_or, integers

MOST_ROWS = 2**20
"""Rows of q, which a plan lists one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlanCase(Case):
    """Keys of ``decode-plan:...`` (all lengths in tokens).

    lens, q: total_lens (all ranks together, this step's tokens included) and query lengths of the
    requests. max_q: the query length promised for every request; auto is the batch's own maximum.
    world, rank, interleave: of the group, for the local key counts. causal: 0 lets every token see
    all keys of its request. pad_rows: rows of q after the last token.
    """

    suite: ClassVar[str] = "decode-plan"

    lens: tuple[int, ...] = case_field((), integers(0))
    q: tuple[int, ...] = case_field((), integers(0))
    max_q: int | str = case_field("auto", integer_or("auto", 1))
    world: int = case_field(2, integer(1))
    rank: int = case_field(0, integer(0))
    interleave: int = case_field(1, integer(1))
    causal: bool = case_field(True, flag())
    pad_rows: int = case_field(0, integer(0))

    @property
    def promised(self) -> int:
        """max_q as a number, at least 1."""
        return max((1, *self.q)) if self.max_q == "auto" else int(self.max_q)

    def check(self) -> None:
        check_batch(self.suite, self.lens, self.q, self.promised, self.world, self.rank)
        if (rows := sum(self.q) + self.pad_rows) > MOST_ROWS:
            raise CaseError(
                f"decode-plan: q and pad_rows make {rows} rows; accepted are up to {MOST_ROWS}"
            )
