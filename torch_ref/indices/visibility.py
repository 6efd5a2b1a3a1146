"""Which positions and compressed entries a token sees.

A token at position pos sees the window of positions that ends with its own, and those compressed
entries, each of `ratio` positions, that are complete by then: c < (pos + 1) // ratio. Within an
image tokens see one another both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, Int32, Int64
from torch import Tensor

from torch_ref.indices.batch import TokenBatch, token_batch
from torch_ref.indices.checks import first_true, vector, whole

ImageSpans = Sequence[Sequence[tuple[int, int]]]


def visible_entries(
    position: Int[Tensor, " T"], *, compress_ratio: int, topk: int
) -> Int64[Tensor, " T"]:
    """How many compressed entries a token's list names: min((pos + 1) // ratio, topk)."""
    if not topk:
        return torch.zeros_like(position, dtype=torch.long)
    return ((position.long() + 1) // compress_ratio).clamp(max=topk)


def window_positions(
    position: Int[Tensor, " T"],
    *,
    window: int,
    image_left: Int[Tensor, " T"] | None = None,
    image_right: Int[Tensor, " T"] | None = None,
) -> tuple[Int64[Tensor, " T"], Int64[Tensor, " T"]]:
    """The positions [start, end) that a token sees uncompressed, its own among them.

    The window reaches back window - 1 positions, an image as far as image_left where that is
    more, and image_right ahead.
    """
    position = position.long()
    back = torch.full_like(position, window - 1)
    if image_left is not None:
        back = torch.maximum(back, image_left.long())
    end = position + 1
    if image_right is not None:
        end = end + image_right.long()
    return (position - back).clamp(min=0), end


def image_visibility(
    query_start_loc: Int32[Tensor, " n+1"],
    seq_lens: Int32[Tensor, " n"],
    image_spans: ImageSpans,
    *,
    max_image_tokens: int,
) -> tuple[Int32[Tensor, " T"], Int32[Tensor, " T"]]:
    """How many positions before and after itself each token sees for being in an image.

    image_spans holds for each request its images' (first, last) positions, both inclusive. A token
    at pos in [a, b] sees pos - a back and b - pos ahead; in several spans, by the last of them; in
    none, 0 and 0. Source: vLLM's _compute_image_visibility_kernel.

    ValueError: a span that isn't wholly in this step's query tokens, or holds more than
    max_image_tokens. The engine relies on neither happening: it would attend compressed rows as
    positions, or count columns that it has cut.
    """
    batch = token_batch(query_start_loc, seq_lens)
    max_image_tokens = whole("max_image_tokens", max_image_tokens, 0)
    if not isinstance(image_spans, (list, tuple)):
        raise ValueError(
            f"image_spans: {image_spans!r}; accepted is a list of the images of each request"
        )
    if len(image_spans) != len(batch.seq_lens):
        raise ValueError(
            f"image_spans: {len(image_spans)} requests; query_start_loc has {len(batch.seq_lens)}"
        )
    left, right = torch.zeros(2, batch.tokens, dtype=torch.int32, device=batch.position.device)
    for i, spans in enumerate(image_spans):
        prefix, length = batch.prefixes[i], batch.seq_lens[i]
        for first, last in _pairs(spans, i):
            if prefix == length:
                raise ValueError(
                    f"image_spans: [{first}, {last}] of request {i}, which has no query tokens; "
                    "accepted are spans within a request's query tokens"
                )
            if not prefix <= first <= last < length:
                raise ValueError(
                    f"image_spans: [{first}, {last}] of request {i}; accepted are spans within its "
                    f"query tokens, at positions {prefix} to {length - 1}"
                )
            size = last - first + 1
            if size > max_image_tokens:
                raise ValueError(
                    f"image_spans: [{first}, {last}] of request {i} holds {size} tokens; accepted "
                    f"are max_image_tokens = {max_image_tokens}"
                )
            start = batch.first_rows[i] + first - prefix
            steps = torch.arange(size, dtype=torch.int32, device=left.device)
            left[start : start + size] = steps
            right[start : start + size] = size - 1 - steps
    return left, right


def _pairs(spans: object, request: int) -> list[tuple[int, int]]:
    """A request's entry of image_spans, if it is a list of pairs."""
    if isinstance(spans, (list, tuple)) and all(
        isinstance(span, (list, tuple)) and len(span) == 2 for span in spans
    ):
        name = f"image_spans, request {request}"
        return [(whole(name, first, 0), whole(name, last, 0)) for first, last in spans]
    raise ValueError(
        f"image_spans: {spans!r} for request {request}; accepted is a tuple of (first, last) pairs "
        "of positions for each request, empty for one without images"
    )


def check_visibility(
    batch: TokenBatch, image_left: Tensor | None, image_right: Tensor | None
) -> None:
    """ValueError unless left and right are one count a token and stay within its request."""
    for name, values in (("image_left", image_left), ("image_right", image_right)):
        if values is None:
            continue
        vector(name, values, batch.tokens)
        if bool((values < 0).any()):
            (t,) = first_true(values < 0)
            raise ValueError(f"{name}: {int(values[t])} for token {t}; accepted are 0 and more")
    if image_right is not None:
        beyond = batch.position + image_right.long() >= batch.of_token(batch.seq_lens)
        if bool(beyond.any()):
            (t,) = first_true(beyond)
            i = int(batch.request[t])
            raise ValueError(
                f"image_right: {int(image_right[t])} for token {t} at position "
                f"{int(batch.position[t])}; request {i} ends with position {batch.seq_lens[i] - 1}"
            )
