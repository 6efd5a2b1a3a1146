"""A batch of DeepSeek-V4 requests: how its caches are laid out and what each token sees of them."""

from __future__ import annotations

import dataclasses
import re

from compare.protocol.case import CaseError, Key

WIDTH = 512
BLOCK = 256
"""Positions of a page of the compressed cache, which holds BLOCK / ratio entries."""

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


def gathered_positions(seq_len: int, queries: int, window: int) -> int:
    """Positions of a request that its chunk gathers: q + clamp(seq - q, 0, window - 1)."""
    return queries + min(max(seq_len - queries, 0), window - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4Batch:
    """The requests of one step, all lengths in tokens; fields as the case keys of these names.

    seq, q: context of each request, this step's tokens included, and this step's tokens. start:
    query_start_loc's first entry. ratio: tokens of a compressed entry, 1: there is no compressed
    cache. topk: columns of the indexer's lists. page, format: of the window's cache. images: whose
    tokens see the whole image; max_image: the longest that is allowed. bound: what the host takes
    each length for is this much larger. poison: what no token may look at is NaN. seed: of the
    Philox streams.
    """

    seq: tuple[int, ...]
    q: tuple[int, ...]
    start: int
    ratio: int
    topk: int
    window: int
    page: int
    format: str
    images: tuple[Image, ...]
    max_image: int
    bound: int
    seed: int
    poison: bool = True

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

    def shape(self) -> tuple[object, ...]:
        """What its pages and its lists are made for."""
        lists = (self.ratio, self.topk, self.window, self.images, self.max_image)
        return (self.seq, self.q, *lists, self.page, self.format, self.bound)

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

    def check(
        self, suite: str, *, max_len: int | None = None, max_tokens: int | None = None
    ) -> None:
        """What every case with such a batch must fulfil; CaseError. max_len, max_tokens: the most
        positions and tokens of a request, where there is a limit.
        """
        if len(self.seq) != len(self.q):
            raise CaseError(
                f"{suite}: seq has {len(self.seq)} requests and q has {len(self.q)}; "
                "one number for each request in both"
            )
        if self.ratio == 1 and self.topk != 64:
            raise CaseError(f"{suite}: ratio=1 has no compressed cache, so topk isn't written")
        for i, (length, queries) in enumerate(zip(self.seq, self.q, strict=True)):
            if queries > length:
                raise CaseError(
                    f"{suite}: request {i} has q={queries} tokens of seq={length}; "
                    "seq counts this step's tokens too"
                )
            too_long = max_len is not None and length + self.bound > max_len
            if too_long or (max_tokens is not None and queries > max_tokens):
                raise CaseError(
                    f"{suite}: request {i} has seq={length} (+ bound={self.bound}) and "
                    f"q={queries}; accepted are at most max_len={max_len} and "
                    f"max_tokens={max_tokens}, which the workspace is sized for"
                )
        if self.slots > MAX_SLOTS:
            topk = "" if self.ratio == 1 else f"topk={self.topk}, "
            raise CaseError(
                f"{suite}: {topk}window={self.window} and max_image={self.max_image} make lists "
                f"of {self.slots} columns; accepted are at most {MAX_SLOTS}"
            )
        for image in self.images:
            self._check_image(suite, image)

    def _check_image(self, suite: str, image: Image) -> None:
        request, first, last = image
        named = f"{suite}: image {request}:{first}-{last}"
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
