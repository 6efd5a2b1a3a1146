"""Which request each query token belongs to, where it stands in it, and what images it is in.

Notation of the prefill path: n requests, T query tokens, all int32. `query_start_loc` [n + 1]
holds the requests' offsets into the batch's tokens and may begin above 0, as in a batch whose
first requests decode: rows are counted from its first entry. `seq_lens` [n] are tokens of context,
this step's included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.arrays import compiled_or_numpy, namespace, to_jax
from jax_impl.prefill.indices import checks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Array, Bool, Int32


class IndexLists(NamedTuple):
    """One list of keys for each query token, filled up with -1.

    indices: row t holds the keys of token t in its first lengths[t] columns.
    lengths: int32; 0 for a token of padding.
    """

    indices: Int32[Array, "T C"]
    lengths: Int32[Array, " T"]


def nothing_listed(num_tokens: int, width: int) -> IndexLists:
    """The lists of a batch without requests."""
    return IndexLists(
        jnp.full((num_tokens, width), -1, jnp.int32), jnp.zeros(num_tokens, jnp.int32)
    )


class ImageVisibility(NamedTuple):
    """Positions of its image that a token sees on either side of itself; 0 outside of images."""

    left: Int32[Array, " T"]
    right: Int32[Array, " T"]


class Tokens(NamedTuple):
    """The rows of a batch: request and position of each token, and whether it is one at all.

    Rows past the last request's tokens are padding: real is False and the rest is meaningless,
    though request is still a request.
    """

    request: Int32[Array, " T"]
    position: Int32[Array, " T"]
    real: Bool[Array, " T"]


def token_to_request(
    query_start_loc: Int32[Any, " n+1"],
    num_tokens: int,
    *,
    num_mapped: int | None = None,
    validate: bool = True,
) -> Int32[Array, " T"]:
    """The request of each query token: the first whose tokens end after it.

    Requests without tokens are passed over. A token behind the last request's counts as the last
    request's, and one at num_mapped or behind as request 0's (vLLM 0.33.0, v1/attention/ops/
    metadata.py): whoever pads has to know so.

    Args:
      query_start_loc: [n + 1] int32 offsets that never fall, n >= 1; may begin above 0.
      num_tokens: T, static; token 0 is the one at query_start_loc[0].
      num_mapped: tokens that have a request, static; None: all.
      validate: looks at the values of query_start_loc outside jit, which waits for them.

    Raises:
      ValueError: an argument of the wrong type or range, or offsets that fall.
    """
    num_requests = checks.requests_of(query_start_loc)
    num_tokens = checks.count(num_tokens, "num_tokens")
    if num_mapped is not None:
        num_mapped = checks.count(num_mapped, "num_mapped")
    if num_requests == 0:
        raise ValueError("query_start_loc must have an entry more than requests, and 1 or more")
    if checks.known(validate, query_start_loc):
        checks.check_offsets(query_start_loc)
    mapped = num_tokens if num_mapped is None else num_mapped
    return _token_to_request(to_jax(query_start_loc, "query_start_loc"), num_tokens, mapped)


@compiled_or_numpy("num_tokens")
def _token_to_request(query_start_loc: jax.Array, num_tokens: int, num_mapped: Any) -> jax.Array:
    xp = namespace(query_start_loc)
    token = xp.arange(num_tokens, dtype=xp.int32)
    ends = query_start_loc[1:] - query_start_loc[0]
    # One pass; a search by halves is a loop of several.
    request = xp.sum(ends[:, None] <= token, axis=0, dtype=xp.int32)
    request = xp.minimum(request, ends.shape[0] - 1)
    return xp.where(token < num_mapped, request, 0)


def tokens_of(query_start_loc: jax.Array, seq_lens: jax.Array, num_tokens: int) -> Tokens:
    """Request and position of each of num_tokens rows; position = seq_len - query_len + row."""
    offsets = query_start_loc - query_start_loc[0]
    token = namespace(offsets).arange(num_tokens, dtype=np.int32)
    request = _token_to_request(query_start_loc, num_tokens, num_tokens)
    return Tokens(
        request=request,
        # The last token of a request stands at the end of its context.
        position=seq_lens[request] - (offsets[request + 1] - token),
        real=token < offsets[-1],
    )


def gather_lens(
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    *,
    window: int = 128,
    replay_start: Int32[Any, " n"] | None = None,
    validate: bool = True,
) -> Int32[Array, " n"]:
    """Window rows that each request needs: its tokens and the window - 1 positions before them.

    query_len + min(max(seq_len - query_len - replay_start, 0), window - 1): the last so many
    positions of its context (vLLM 0.33.0, v1/attention/backends/mla/sparse_swa.py). The planner's
    `jax_impl.planning.gather_lens` is the same on the host, where seq_lens may be upper bounds.

    Args:
      query_start_loc, seq_lens: the batch, as in this module's head.
      window: positions that a token sees, its own included, >= 1.
      replay_start: [n] int32, the first position whose window rows are still there; None: 0.
      validate: looks at values outside jit, which waits for them.

    Raises:
      ValueError: an argument of the wrong type or range, a query longer than its context, or,
        outside jit, a negative replay_start.
    """
    num_requests = checks.batch_of(query_start_loc, seq_lens)
    window = checks.count(window, "window", least=1)
    if replay_start is None:
        replay_start = np.zeros(num_requests, np.int32)
    else:
        checks.one_each(replay_start, "replay_start", num_requests)
    if checks.known(validate, query_start_loc, seq_lens, replay_start):
        checks.check_batch(query_start_loc, seq_lens)
        checks.check_replay(replay_start)
    return window_rows(
        to_jax(query_start_loc, "query_start_loc"),
        to_jax(seq_lens, "seq_lens"),
        window,
        to_jax(replay_start, "replay_start"),
    )


@compiled_or_numpy()
def window_rows(
    query_start_loc: jax.Array, seq_lens: jax.Array, window: Any, replay_start: Any = 0
) -> jax.Array:
    xp = namespace(query_start_loc)
    query_lens = xp.diff(query_start_loc)
    before = seq_lens - query_lens - replay_start
    return query_lens + xp.clip(before, 0, window - 1)


def image_spans_csr(
    image_spans: Sequence[Sequence[tuple[int, int]]],
) -> tuple[np.ndarray, np.ndarray]:
    """Spans listed by request as the arrays that `image_visibility` takes: spans, span_offsets.

    ValueError: an entry that is not a tuple (list, array) of (first, last) pairs of positions.
    """
    for request, spans in enumerate(image_spans):
        if not _has_axis(spans) or not all(_has_axis(span) and len(span) == 2 for span in spans):
            raise ValueError(
                "image_spans must hold a tuple of (first, last) positions for each request, as in "
                f"((0, 5), (8, 9)), or () without images; got {spans!r} for request {request}"
            )
    offsets = np.cumsum([0, *(len(spans) for spans in image_spans)])
    flat = [span for spans in image_spans for span in spans]
    for index, span in enumerate(flat):
        for position in span:
            checks.count(position, f"image_spans, span {index},")
    return np.asarray(flat, np.int32).reshape(-1, 2), offsets.astype(np.int32)


def _has_axis(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) >= 1


def image_visibility(
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    spans: Int32[Any, "S 2"],
    span_offsets: Int32[Any, " n+1"],
    *,
    max_image_tokens: int,
    num_tokens: int | None = None,
    validate: bool = True,
) -> ImageVisibility:
    """How far each token sees within its image: all of the image, whatever the sliding window.

    A token at position p inside the span [a, b] sees min(p - a, max_image_tokens - 1) positions to
    its left and min(b - p, max_image_tokens) to its right. Of several spans that hold it the last
    one counts (vLLM 0.33.0, sparse_swa.py, `_compute_image_visibility_kernel`).

    Args:
      query_start_loc, seq_lens: the batch, as in this module's head.
      spans: [S, 2] int32, first and last position of each image, both inclusive, in the order of
        the requests; `image_spans_csr` makes them of a list for each request.
      span_offsets: [n + 1] int32: the spans of request i are span_offsets[i] to
        span_offsets[i + 1] - 1.
      max_image_tokens: most positions of an image, >= 0.
      num_tokens: T, static; None: as many as the requests have, which can't be asked inside jit.
      validate: looks at values outside jit, which waits for them.

    Raises:
      ValueError: an argument of the wrong type or range; or, outside jit, a span that is empty,
        longer than max_image_tokens, or not wholly among this step's tokens of its request: its
        rows would not all be there. Inside jit no value can be looked at.
    """
    num_requests = checks.batch_of(query_start_loc, seq_lens)
    num_spans, pair = checks.int32_shape(spans, "spans", "[S, 2]")
    if pair != 2:
        raise ValueError(f"spans must be [S, 2]; got shape [{num_spans}, {pair}]")
    checks.one_each(span_offsets, "span_offsets", num_requests, more=1)
    max_image_tokens = checks.count(max_image_tokens, "max_image_tokens")
    num_tokens = checks.tokens_in(query_start_loc, num_tokens)
    if checks.known(validate, query_start_loc, seq_lens, spans, span_offsets):
        checks.check_batch(query_start_loc, seq_lens, num_tokens)
        checks.check_spans(query_start_loc, seq_lens, spans, span_offsets, max_image_tokens)
    return visible_in_images(
        to_jax(query_start_loc, "query_start_loc"),
        to_jax(seq_lens, "seq_lens"),
        to_jax(spans, "spans"),
        to_jax(span_offsets, "span_offsets"),
        max_image_tokens,
        num_tokens=num_tokens,
    )


@compiled_or_numpy("num_tokens")
def visible_in_images(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    spans: jax.Array,
    span_offsets: jax.Array,
    max_image_tokens: Any,
    *,
    num_tokens: int,
) -> ImageVisibility:
    xp = namespace(query_start_loc)
    if not spans.shape[0] or not seq_lens.shape[0]:
        nothing = xp.zeros(num_tokens, xp.int32)
        return ImageVisibility(nothing, nothing)
    token = tokens_of(query_start_loc, seq_lens, num_tokens)
    number = xp.arange(spans.shape[0], dtype=xp.int32)
    owner = xp.searchsorted(span_offsets[1:], number, side="right")
    first, last = spans[:, 0], spans[:, 1]
    position = token.position[:, None]
    holds = (owner == token.request[:, None]) & (first <= position) & (position <= last)
    chosen = xp.max(xp.where(holds, number, -1), axis=1, initial=-1)
    inside = (chosen >= 0) & token.real
    left = xp.minimum(token.position - first[chosen], max_image_tokens - 1)
    right = xp.minimum(last[chosen] - token.position, max_image_tokens)
    return ImageVisibility(xp.where(inside, left, 0), xp.where(inside, right, 0))
