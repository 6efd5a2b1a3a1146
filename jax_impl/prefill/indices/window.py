"""Lists of slots of the sliding-window cache: a token's own window, or a draft block's.

A token whose `slot_mapping` is negative is padding: its KV is written nowhere. Inside jit, where
no value can be looked at, a slot that block table and cache don't hold is -1, which no attention
reads, and a length is kept between 0 and the width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jax_impl.arrays import compiled_or_numpy, namespace
from jax_impl.prefill.indices import checks
from jax_impl.prefill.indices.slots import PagedBatch, as_jax
from jax_impl.prefill.indices.tokens import IndexLists, Tokens, nothing_listed, tokens_of

if TYPE_CHECKING:
    from jaxtyping import Int32

DRAFT_WIDTH_MULTIPLE = 64


def paged_swa_indices(
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    block_table: Int32[Any, "n columns"],
    slot_mapping: Int32[Any, " T"],
    *,
    page_size: int,
    width: int,
    window: int = 128,
    num_slots: int | None = None,
    replay_start: Int32[Any, " n"] | None = None,
    image_left: Int32[Any, " T"] | None = None,
    image_right: Int32[Any, " T"] | None = None,
    validate: bool = True,
) -> IndexLists:
    """Each token's own window: positions max(pos - max(window - 1, left), 0, replay_start) to
    pos + right, ascending (vLLM 0.33.0, v1/attention/backends/mla/sparse_swa.py).

    Args:
      query_start_loc, seq_lens: [n + 1] and [n] int32, the batch; the first entry may be above 0.
      block_table: [n, columns] int32. Columns that no window needs may hold anything.
      slot_mapping: [T] int32, negative for padding: length 0, all -1.
      page_size: tokens of a page. width: columns of the lists, static; it is no window.
      window: positions that a token sees, its own included.
      num_slots: pages times page size of the cache; None: not known, only int32 is.
      replay_start: [n] int32, first position that is still in the cache; None: 0.
      image_left, image_right: [T] int32 of `image_visibility`; None: no images.
      validate: looks at values outside jit, which waits for them.

    Returns:
      IndexLists(indices [T, width] int32, lengths [T] int32).

    Raises:
      ValueError: an argument of the wrong type or range; outside jit also a window longer than
        the width, a negative replay_start or one behind a token (its length would be negative), an
        image's positions that are not this step's, a page outside of block_table or cache.
    """
    batch = PagedBatch.checked(
        query_start_loc, seq_lens, block_table, slot_mapping,
        page_size=page_size, num_slots=num_slots,
    )  # fmt: skip
    width = checks.count(width, "width", least=1)
    window = checks.count(window, "window", least=1)
    if replay_start is None:
        replay_start = np.zeros(batch.num_requests, np.int32)
    checks.one_each(replay_start, "replay_start", batch.num_requests)
    nothing = np.zeros(batch.num_tokens, np.int32)
    image_left = nothing if image_left is None else image_left
    image_right = nothing if image_right is None else image_right
    checks.one_each(image_left, "image_left", batch.num_tokens, of="T")
    checks.one_each(image_right, "image_right", batch.num_tokens, of="T")

    images = (image_left, image_right)
    tokens = batch.known_tokens(validate, replay_start, *images)
    if tokens is not None:
        checks.check_replay(replay_start)
        real = len(tokens.request)
        left, right = (np.asarray(image, np.int64)[:real] for image in images)
        queries = np.diff(np.asarray(query_start_loc, np.int64))
        checks.check_images(tokens, seq_lens, left, right, queries)
        first = np.maximum(tokens.position - np.maximum(window - 1, left), 0)
        first = np.maximum(first, np.asarray(replay_start, np.int64)[tokens.request])
        end = tokens.position + right + 1
        _check_windows(batch, tokens, first, end, width, "width, window and replay_start")
    if not batch.num_requests:
        return nothing_listed(batch.num_tokens, width)
    return _paged_swa(
        batch.as_jax(),
        *as_jax(replay_start=replay_start, image_left=image_left, image_right=image_right),
        window, width=width,
    )  # fmt: skip


@compiled_or_numpy("width")
def _paged_swa(
    batch: PagedBatch,
    replay_start: jax.Array,
    image_left: jax.Array,
    image_right: jax.Array,
    window: Any,
    *,
    width: int,
) -> IndexLists:
    token = tokens_of(batch.query_start_loc, batch.seq_lens, batch.num_tokens)
    xp = namespace(image_left)
    first = xp.maximum(token.position - xp.maximum(window - 1, image_left), 0)
    first = xp.maximum(first, replay_start[token.request])
    end = xp.minimum(token.position + image_right + 1, batch.seq_lens[token.request])
    return _window_slots(batch, token, first, end, width)


def dspark_indices(
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    block_table: Int32[Any, "n columns"],
    slot_mapping: Int32[Any, " T"],
    *,
    page_size: int,
    num_speculative_tokens: int,
    window: int = 128,
    num_slots: int | None = None,
    validate: bool = True,
) -> IndexLists:
    """The window of a draft block that isn't causal: every token of it sees the whole block and
    the `window` positions before it, max(prefix - window, 0) to seq_len - 1, ascending (vLLM
    0.33.0, compressor_utils.py).

    Unlike in `paged_swa_indices` all tokens of a request share one list: its start belongs to the
    block and its window doesn't count the token itself.

    Args:
      num_speculative_tokens: most tokens of a block, static: the lists are window +
        num_speculative_tokens wide, up to a multiple of 64.
      The other arguments: as in `paged_swa_indices`.

    Raises:
      ValueError: an argument of the wrong type or range; outside jit also a list longer than the
        width, a page outside of block_table or cache.
    """
    batch = PagedBatch.checked(
        query_start_loc, seq_lens, block_table, slot_mapping,
        page_size=page_size, num_slots=num_slots,
    )  # fmt: skip
    window = checks.count(window, "window", least=1)
    drafted = checks.count(num_speculative_tokens, "num_speculative_tokens")
    width = checks.list_width(DRAFT_WIDTH_MULTIPLE, window=window, num_speculative_tokens=drafted)
    tokens = batch.known_tokens(validate)
    if tokens is not None:
        ends = np.asarray(seq_lens, np.int64)
        prefixes = ends - np.diff(np.asarray(query_start_loc, np.int64))
        first = np.maximum(prefixes - window, 0)[tokens.request]
        causes = "window and num_speculative_tokens"
        _check_windows(batch, tokens, first, ends[tokens.request], width, causes)
    if not batch.num_requests:
        return nothing_listed(batch.num_tokens, width)
    return _draft_block(batch.as_jax(), window, width=width)


@compiled_or_numpy("width")
def _draft_block(batch: PagedBatch, window: Any, *, width: int) -> IndexLists:
    token = tokens_of(batch.query_start_loc, batch.seq_lens, batch.num_tokens)
    xp = namespace(batch.seq_lens)
    first = xp.maximum(batch.seq_lens - xp.diff(batch.query_start_loc) - window, 0)
    return _window_slots(batch, token, first[token.request], batch.seq_lens[token.request], width)


def _window_slots(
    batch: PagedBatch, token: Tokens, first: jax.Array, end: jax.Array, width: int
) -> IndexLists:
    xp = namespace(first)
    real = token.real & (batch.slot_mapping >= 0)
    position = first[:, None] + xp.arange(width, dtype=xp.int32)
    position = xp.where(real[:, None] & (position < end[:, None]), position, -1)
    slots = batch.slots_of(token.request[:, None], position)
    return IndexLists(slots, xp.where(real, xp.clip(end - first, 0, width), 0))


def _check_windows(
    batch: PagedBatch,
    tokens: checks.HostTokens,
    first: np.ndarray,
    end: np.ndarray,
    width: int,
    causes: str,
) -> None:
    """The windows [first, end) of the tokens that are not padding fit the width and the table."""
    used = np.asarray(batch.slot_mapping)[: len(tokens.request)] >= 0
    checks.check_lengths(np.where(used, end - first, 0), width, causes)
    for request in np.unique(tokens.request[used]):
        mine = used & (tokens.request == request)
        wanted = np.arange(first[mine].min(), end[mine].max())
        batch.check_pages(int(request), wanted)
