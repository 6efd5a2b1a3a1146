"""The case line of the suite ``v4-prefill``: one step's prefill requests of DeepSeek-V4, from paged
caches to attention output.
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from compare.judging.plan_rules import gathered_positions
from compare.protocol.case import (
    Case,
    CaseError,
    Key,
    case_field,
    flag,
    integer,
    integers,
    number,
    word,
)

WIDTH = 512
BLOCK = 256
"""Positions of a page of the compressed cache, which holds BLOCK / ratio entries."""
EXACT_TOKENS = 16
"""Query tokens of a request that data=exact has columns for; see exact.py."""

MAX_SLOTS = 2**17
"""Columns of a token's list at most: far above every model's, and its inputs still fit memory."""

Image = tuple[int, int, int]
"""Request, first and last position."""


def _read_images(text: str) -> tuple[Image, ...]:
    if text == "none":
        return ()
    found = [re.fullmatch(r"(\d+):(\d+)-(\d+)", part, re.ASCII) for part in text.split("+")]
    if not all(found):
        raise ValueError
    return tuple(
        (int(request), int(first), int(last))
        for request, first, last in (match.groups() for match in found if match)
    )


IMAGES = Key(
    _read_images,
    "REQUEST:FIRST-LAST joined by + (or none)",
    lambda images: "+".join(f"{i}:{first}-{last}" for i, first, last in images) or "none",
)


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

    @property
    def tokens(self) -> int:
        """T: query tokens of all requests."""
        return sum(self.q)

    @property
    def listed(self) -> int:
        """Columns of topk_indices; 0 where there is no compressed cache."""
        return 0 if self.ratio == 1 else self.topk

    @property
    def slots(self) -> int:
        """C: columns of a token's list, window and image included."""
        return -(-(self.listed + self.window + self.max_image) // 128) * 128

    @property
    def compressed_page(self) -> int:
        """Entries of a page of the compressed cache."""
        return BLOCK // self.ratio

    @property
    def scale(self) -> float:
        """sm_scale."""
        return WIDTH**-0.5

    @property
    def flop(self) -> int:
        """Multiply-adds times two of one pass over all slots: 2 T H C (512 + 512)."""
        return 2 * self.tokens * self.h * self.slots * 2 * WIDTH

    def shape(self) -> tuple[object, ...]:
        return (*self.batch_shape(), self.h, self.plan)

    def batch_shape(self) -> tuple[object, ...]:
        """What of the batch its chunks, its pages and its lists are made for."""
        chunks = (self.max_len, self.max_tokens, self.chunk, self.bound)
        lists = (self.ratio, self.topk, self.window, self.images, self.max_image)
        return (self.seq, self.q, *lists, self.page, self.format, *chunks)

    def elements(self) -> int:
        gathered = sum(self.compressed(i) + self.gathered(i) for i in range(len(self.seq)))
        return self.tokens * self.h * 2 * WIDTH + gathered * WIDTH

    def blocks(self, keys: int, heads: int) -> int:
        """How many blocks of `keys` slots x `heads` heads a kernel walks."""
        return -(-self.slots // keys) * -(-self.h // heads) * self.tokens

    def compressed(self, request: int, *, bound: bool = False) -> int:
        """Compressed entries of a request; bound: as the host takes them to be."""
        if self.ratio == 1:
            return 0
        return (self.seq[request] + self.bound * bound) // self.ratio

    def gathered(self, request: int, *, bound: bool = False) -> int:
        """Positions of a request, its last ones, that some of its tokens see through the window;
        bound: as the host takes them to be.
        """
        length = self.seq[request] + self.bound * bound
        return gathered_positions(length, self.q[request], self.window)

    def reach(self, request: int, position: int) -> tuple[int, int]:
        """How many positions before and after its own a token's image has: of several images that
        hold it, the last; 0, 0 where none does.
        """
        found = (0, 0)
        for owner, first, last in self.images:
            if owner == request and first <= position <= last:
                found = (position - first, last - position)
        return found

    def seen(self, request: int, position: int) -> tuple[int, int]:
        """The positions [start, end) that a token sees through its window and its image."""
        left, right = self.reach(request, position)
        return max(0, position - max(self.window - 1, left)), position + right + 1

    def check(self) -> None:
        if len(self.seq) != len(self.q):
            raise CaseError(
                f"v4-prefill: seq has {len(self.seq)} requests and q has {len(self.q)}; "
                "one number for each request in both"
            )
        if self.ratio == 1 and self.topk != 64:
            raise CaseError("v4-prefill: ratio=1 has no compressed cache, so topk isn't written")
        for i, (length, queries) in enumerate(zip(self.seq, self.q, strict=True)):
            if queries > length:
                raise CaseError(
                    f"v4-prefill: request {i} has q={queries} tokens of seq={length}; "
                    "seq counts this step's tokens too"
                )
            if length + self.bound > self.max_len or queries > self.max_tokens:
                raise CaseError(
                    f"v4-prefill: request {i} has seq={length} (+ bound={self.bound}) and "
                    f"q={queries}; accepted are at most max_len={self.max_len} and "
                    f"max_tokens={self.max_tokens}, which the workspace is sized for"
                )
        if self.slots > MAX_SLOTS:
            topk = "" if self.ratio == 1 else f"topk={self.topk}, "
            raise CaseError(
                f"v4-prefill: {topk}window={self.window} and max_image={self.max_image} make lists "
                f"of {self.slots} columns; accepted are at most {MAX_SLOTS}"
            )
        for image in self.images:
            self._check_image(image)
        if self.data == "exact":
            self._check_exact()

    def _check_image(self, image: Image) -> None:
        request, first, last = image
        named = f"v4-prefill: image {request}:{first}-{last}"
        if request >= len(self.seq):
            raise CaseError(f"{named} is of request {request} of {len(self.seq)}")
        length = self.seq[request]
        if not self.q[request]:
            raise CaseError(f"{named} is of a request without tokens in this step (q=0)")
        if not length - self.q[request] <= first <= last < length:
            raise CaseError(
                f"{named} isn't within this step's tokens, positions "
                f"{length - self.q[request]} to {length - 1}"
            )
        if last - first + 1 > self.max_image:
            raise CaseError(f"{named} is longer than max_image={self.max_image}")

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
