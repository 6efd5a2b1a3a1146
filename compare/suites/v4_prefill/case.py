"""The case line of the suite ``v4-prefill``: one step's prefill requests of DeepSeek-V4, from paged
caches to attention output.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import ClassVar

from compare.generate.v4_batch import IMAGES, WIDTH, Image, V4Batch
from compare.protocol.case import (
    Case,
    CaseError,
    case_field,
    flag,
    integer,
    integers,
    number,
    word,
)

EXACT_TOKENS = 16
"""Query tokens of a request that data=exact has columns for; see exact.py."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4PrefillCase(Case):
    """Keys of ``v4-prefill:...`` (all lengths in tokens).

    seq, q: of each request its context, this step's tokens included, and this step's tokens; a
        request may have none, and then nothing of it is read.
    start: query_start_loc's first entry; above 0 where decode requests stand before.
    ratio: compress_ratio; 1 has no compressed cache. topk: columns of the indexer's lists, of which
        a token uses as many as it sees entries.
    window: positions that a token sees, its own included. page: page size of the window's cache;
        a page of the compressed one has 256 / ratio entries. h: query heads H.
    format: of both caches, v4-fp8 or bf16; the keys are the same.
    images: REQUEST:FIRST-LAST, positions inclusive, whose tokens see the whole image.
        max_image: the longest that is allowed.
    max_len, max_tokens, chunk: max_model_len, max_num_batched_tokens and chunk size of the planner.
    bound: what the host takes each length for when it plans is this much larger.
    plan: fixed, alone (each request a chunk of its own) or vllm-0.33.0.
    sink: none, mixed (finite near ln K, -inf and +inf), zero, one number for all heads, -inf, inf,
        nan.
    data: normal, flat (score spread <= 0.2), peaked, exact (P is 0 or 1: the output must be
        bit-equal).
    poison: slots outside every length are NaN, padding bytes anything, and block-table columns
        that no token needs are out of range or another request's pages. seed: of the Philox
        streams.
    """

    suite: ClassVar[str] = "v4-prefill"

    seq: tuple[int, ...] = case_field((), integers(0))
    q: tuple[int, ...] = case_field((), integers(0))
    start: int = case_field(0, integer(0))
    ratio: int = case_field(4, word("1", "2", "4", "128", convert=int))
    topk: int = case_field(64, integer(1))
    window: int = case_field(128, integer(1))
    page: int = case_field(64, integer(1))
    h: int = case_field(64, integer(1, 128))
    format: str = case_field("v4-fp8", word("v4-fp8", "bf16"))
    images: tuple[Image, ...] = case_field((), IMAGES)
    max_image: int = case_field(0, integer(0))
    max_len: int = case_field(8192, integer(1))
    max_tokens: int = case_field(2048, integer(1))
    chunk: int = case_field(4, integer(1))
    bound: int = case_field(0, integer(0))
    plan: str = case_field("fixed", word("fixed", "alone", "vllm-0.33.0"))
    sink: float | str = case_field(
        "none", number(None, None, "none", "mixed", "zero", "-inf", "inf", "nan")
    )
    data: str = case_field("normal", word("normal", "flat", "peaked", "exact"))
    poison: bool = case_field(True, flag())
    seed: int = case_field(0, integer(0, 2**32 - 1))

    @cached_property
    def batch(self) -> V4Batch:
        """The requests, their caches and what each token sees."""
        return V4Batch(
            seq=self.seq,
            q=self.q,
            start=self.start,
            ratio=self.ratio,
            topk=self.topk,
            window=self.window,
            page=self.page,
            format=self.format,
            images=self.images,
            max_image=self.max_image,
            bound=self.bound,
            seed=self.seed,
            poison=self.poison,
        )

    @property
    def tokens(self) -> int:
        """T: query tokens of all requests."""
        return self.batch.tokens

    @property
    def slots(self) -> int:
        """C: columns of a token's list, window and image included."""
        return self.batch.slots

    @property
    def scale(self) -> float:
        """sm_scale."""
        return WIDTH**-0.5

    @property
    def flop(self) -> int:
        """Multiply-adds times two of one pass over all slots: 2 T H C (512 + 512)."""
        return 2 * self.tokens * self.h * self.slots * 2 * WIDTH

    def shape(self) -> tuple[object, ...]:
        chunks = (self.max_len, self.max_tokens, self.chunk)
        return (*self.batch.shape(), *chunks, self.h, self.plan)

    def elements(self) -> int:
        batch, requests = self.batch, range(len(self.seq))
        gathered = sum(batch.compressed(i) + batch.gathered(i) for i in requests)
        return self.tokens * self.h * 2 * WIDTH + gathered * WIDTH

    def blocks(self, keys: int, heads: int) -> int:
        """How many blocks of `keys` slots x `heads` heads a kernel walks."""
        return -(-self.slots // keys) * -(-self.h // heads) * self.tokens

    def check(self) -> None:
        self.batch.check(self.suite, max_len=self.max_len, max_tokens=self.max_tokens)
        if self.data == "exact":
            self._check_exact()

    def _check_exact(self) -> None:
        if self.sink not in ("none", "-inf"):
            raise CaseError(
                "v4-prefill: data=exact takes sink none or -inf: only then are the probabilities "
                "0 or 1 over a power of two"
            )
        if max((0, *self.q)) > EXACT_TOKENS:
            raise CaseError(
                f"v4-prefill: data=exact takes at most q={EXACT_TOKENS} tokens of a request, which "
                "have columns of their own"
            )
