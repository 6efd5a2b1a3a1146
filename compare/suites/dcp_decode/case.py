"""The case line of the suite ``dcp-decode``: one rank's decode of a batch, or that of all ranks
merged.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from compare.generate.decode_batch import check_batch
from compare.generate.ownership import local_length
from compare.protocol.case import (
    Case,
    CaseError,
    case_field,
    flag,
    integer,
    integer_or,
    integers,
    number,
    word,
)

KEY_WIDTH = 576

VALUE_WIDTH = 512

LEAST_KV_SCALE = 1 / 112
"""Keys reach up to 4, and float8_e4m3fn holds up to 448."""

EXACT_TOKENS = 16
"""Query tokens of a request that data=exact has selector columns for; see exact.py."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcpDecodeCase(Case):
    """Keys of ``dcp-decode:...`` (all lengths in tokens).

    lens, q: keys of each request on all ranks together, this step's tokens included, and its query
        tokens; a request may have none of either, and fewer keys than tokens.
    h, page: query heads H, page size P.
    world, rank, interleave: of the group; rank=all runs every rank and merges.
    kv: bf16, or e4m3 with one scale for the tensor. q_dtype: likewise of q; e4m3 with kv=e4m3 only.
    kv_scale: what a stored e4m3 key is multiplied by; auto is 3/256, with data=exact 1/2.
    missing: keys at the end of its share of each request that the rank hasn't got, so that seq_lens
        is less than what total_lens gives it.
    causal: 0 lets every token see all keys of its request (a draft block).
    pad_rows: rows of q after the last token. max_q: the query length promised for every request;
        auto is the batch's own maximum.
    stale: block-table entries past a request's keys are out of range or another request's pages.
    data: normal, flat (score spread <= 0.2), peaked, exact (P is 0 or 1: the output of a rank must
        be bit-equal).
    nan: a NaN in q, in one head of the middle token, or in the last key that is the rank's first of
        a request (with rank=all the request's first), which all of its tokens with a key see.
    sm_scale: multiplies q.k, natural units; auto is 576^-0.5. seed: of the Philox streams.
    Whatever lies outside every length (slots past a request's keys, pages that no request has,
    padded rows of q) is NaN.
    """

    suite: ClassVar[str] = "dcp-decode"

    lens: tuple[int, ...] = case_field((), integers(0))
    q: tuple[int, ...] = case_field((), integers(0))
    h: int = case_field(16, integer(1, 128))
    page: int = case_field(64, integer(1))
    world: int = case_field(1, integer(1))
    rank: int | str = case_field(0, integer_or("all", 0))
    interleave: int = case_field(1, integer(1))
    kv: str = case_field("bf16", word("bf16", "e4m3"))
    q_dtype: str = case_field("bf16", word("bf16", "e4m3"))
    kv_scale: float | str = case_field("auto", number(LEAST_KV_SCALE, 1.0, "auto"))
    missing: int = case_field(0, integer(0))
    causal: bool = case_field(True, flag())
    pad_rows: int = case_field(0, integer(0))
    max_q: int | str = case_field("auto", integer_or("auto", 1))
    stale: bool = case_field(False, flag())
    data: str = case_field("normal", word("normal", "flat", "peaked", "exact"))
    nan: str = case_field("none", word("none", "q", "key"))
    sm_scale: float | str = case_field("auto", number(None, None, "auto"))
    seed: int = case_field(0, integer(0, 2**32 - 1))

    @property
    def tokens(self) -> int:
        """T: rows of q, padding included."""
        return sum(self.q) + self.pad_rows

    @property
    def promised(self) -> int:
        """max_q as a number, at least 1."""
        return max((1, *self.q)) if self.max_q == "auto" else int(self.max_q)

    @property
    def scale(self) -> float:
        """sm_scale as a number."""
        return KEY_WIDTH**-0.5 if self.sm_scale == "auto" else float(self.sm_scale)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run."""
        return tuple(range(self.world)) if self.rank == "all" else (int(self.rank),)

    @property
    def flop(self) -> int:
        """Multiply-adds times two of all query rows with all of their request's keys on the ranks
        that run.
        """
        keys = sum(
            queries * self.keys_of(rank, total)
            for rank in self.ranks
            for total, queries in zip(self.lens, self.q, strict=True)
        )
        return 2 * self.h * keys * (KEY_WIDTH + VALUE_WIDTH)

    def shape(self) -> tuple[object, ...]:
        rows = (self.lens, self.q, self.h, self.causal)  # a plan has the size of its batch
        group = (self.world, self.rank, self.interleave)
        return (*rows, self.page, self.kv, self.q_dtype, *group)

    def elements(self) -> int:
        rows = self.tokens * self.h * (KEY_WIDTH + VALUE_WIDTH)
        return len(self.ranks) * (rows + sum(self.lens) * KEY_WIDTH)

    def keys_of(self, rank: int, total: int) -> int:
        """Keys of a rank of a request with `total` keys."""
        return local_length(total, rank, self.world, self.interleave)

    def blocks(self, keys: int, rows: int) -> int:
        """How many blocks of `keys` keys x `rows` (token, head) rows a kernel walks that takes all
        tokens of a request together.
        """
        return sum(
            -(-self.keys_of(rank, total) // keys) * -(-queries * self.h // rows)
            for rank in self.ranks
            for total, queries in zip(self.lens, self.q, strict=True)
        )

    def check(self) -> None:
        check_batch(self.suite, self.lens, self.q, self.promised, self.world, self.rank)
        if self.page % self.interleave:
            raise CaseError(
                f"dcp-decode: interleave={self.interleave} doesn't divide page={self.page}; "
                "a run of keys mustn't lie on two pages"
            )
        if self.q_dtype == "e4m3" and self.kv != "e4m3":
            raise CaseError(
                f"dcp-decode: q_dtype=e4m3 with kv={self.kv}; float8 queries go with kv=e4m3"
            )
        if self.kv_scale != "auto" and self.kv != "e4m3":
            raise CaseError(
                f"dcp-decode: kv_scale={self.kv_scale} with kv={self.kv}; only kv=e4m3 has a scale"
            )
        if self.missing and self.rank == "all":
            raise CaseError(
                f"dcp-decode: missing={self.missing} with rank=all; accepted is one rank, since "
                "ranks that are merged must hold all keys"
            )
        if self.nan == "q" and not sum(self.q):
            raise CaseError("dcp-decode: nan=q without a query token")
        if self.nan == "key" and self.nan_key is None:
            raise CaseError("dcp-decode: nan=key, and no request with tokens has a key on the rank")
        if self.data == "exact":
            self._check_exact()

    @property
    def nan_token(self) -> tuple[int, int] | None:
        """(row of q, head) where nan=q puts a NaN."""
        return (sum(self.q) // 2, self.h // 2) if self.nan == "q" else None

    @property
    def nan_key(self) -> tuple[int, int] | None:
        """(request, global position) where nan=key puts a NaN."""
        first = 0 if self.rank == "all" else int(self.rank) * self.interleave
        having = [
            request
            for request, (total, queries) in enumerate(zip(self.lens, self.q, strict=True))
            if queries and total > first
        ]
        return (having[-1], first) if self.nan == "key" and having else None

    def _check_exact(self) -> None:
        for name in ("kv_scale", "missing", "nan"):
            if (value := getattr(self, name)) not in ("auto", "none", 0):
                raise CaseError(f"dcp-decode: data=exact takes no {name}, which is {value} here")
        if self.scale <= 0:
            raise CaseError("dcp-decode: data=exact takes a positive sm_scale")
        if max((0, *self.q)) > EXACT_TOKENS:
            raise CaseError(
                f"dcp-decode: data=exact takes at most q={EXACT_TOKENS} tokens of a request, one "
                "selector column each"
            )
        stripe = self.world * self.interleave
        for i, (total, queries) in enumerate(zip(self.lens, self.q, strict=True)):
            if queries and (total - queries + 1 < stripe or stripe & (stripe - 1)):
                raise CaseError(
                    f"dcp-decode: request {i} has lens={total}, q={queries}; data=exact needs "
                    "world * interleave to be a power of two and no more than the keys of a "
                    f"request's first token ({stripe} here): only then is the number of visible "
                    "keys a power of two on every rank"
                )
