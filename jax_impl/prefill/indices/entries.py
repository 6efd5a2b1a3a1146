"""Lists of compressed entries: those that an indexer chose, or all, by number or as slots.

Inside jit, where no value can be looked at, a slot that block table and cache don't hold is -1,
which no attention reads, and a length is kept between 0 and the width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jax_impl.arrays import compiled_or_numpy, namespace
from jax_impl.prefill.indices import checks
from jax_impl.prefill.indices.slots import PagedBatch, as_jax, slots_of
from jax_impl.prefill.indices.tokens import IndexLists, nothing_listed, tokens_of

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32


def global_topk_slots(
    topk_indices: Int32[Any, "T topk"],
    token_to_request: Int32[Any, " T"],
    block_table: Int32[Any, "n columns"],
    *,
    page_size: int,
    num_slots: int | None = None,
    is_valid_token: Bool[Any, " T"] | None = None,
    validate: bool = True,
) -> IndexLists:
    """The compressed entries that decode tokens chose, as slots: a token's list begins with them.

    A -1 stays in its column, and the length counts the entries that are not negative (vLLM 0.33.0,
    as `flash_mla_with_kvcache` wants them). Since a length keeps a row's leftmost columns, a hole
    before an entry would drop the row's last ones: entries must be packed to the left.

    Args:
      topk_indices: [T, topk] int32 entries by number within their request, -1 behind them.
      token_to_request: [T] int32, from 0 to n - 1.
      block_table: [n, columns] int32 of the compressed cache.
      page_size: entries of a page: the block size over the compress ratio.
      num_slots: pages times page size of the cache; None: not known, only int32 is.
      is_valid_token: [T] bool; a False one is padding: its length is 0, and its row is made like
        any other. None: all are valid.
      validate: looks at values outside jit, which waits for them.

    Returns:
      IndexLists(indices [T, topk] int32, lengths [T] int32).

    Raises:
      ValueError: an argument of the wrong type or range; outside jit also a hole before an entry,
        a token_to_request outside of the table, a page outside of block_table or cache. Inside
        jit a hole stays one, and the row's last entries are lost.
    """
    page_size, num_slots = checks.cache_of(page_size, num_slots)
    num_tokens, topk = checks.int32_shape(topk_indices, "topk_indices", "[T, topk]")
    checks.one_each(token_to_request, "token_to_request", num_tokens, of="T")
    num_requests, columns = checks.int32_shape(block_table, "block_table", "[n, columns]")
    checks.check_columns(columns, "block_table")
    if is_valid_token is None:
        is_valid_token = np.ones(num_tokens, bool)
    checks.one_each(is_valid_token, "is_valid_token", num_tokens, of="T", dtypes=("bool",))
    if checks.known(validate, topk_indices, token_to_request, block_table):
        _check_topk(topk_indices, token_to_request, block_table, page_size, num_slots)
    if not num_requests:
        return nothing_listed(num_tokens, topk)
    return _global_topk(
        *as_jax(topk_indices=topk_indices, token_to_request=token_to_request,
                 block_table=block_table, is_valid_token=is_valid_token),
        page_size, num_slots,
    )  # fmt: skip


@compiled_or_numpy()
def _global_topk(
    topk_indices: jax.Array,
    token_to_request: jax.Array,
    block_table: jax.Array,
    is_valid_token: jax.Array,
    page_size: Any,
    num_slots: Any,
) -> IndexLists:
    xp = namespace(topk_indices)
    known = (token_to_request >= 0) & (token_to_request < block_table.shape[0])
    request = xp.where(known, token_to_request, 0)[:, None]
    entry = xp.where(known[:, None], topk_indices, -1)
    slots = slots_of(block_table, request, entry, page_size, num_slots)
    counted = xp.sum(topk_indices >= 0, axis=1, dtype=xp.int32)
    return IndexLists(slots, xp.where(is_valid_token & known, counted, 0))


def _check_topk(
    topk_indices: Any,
    token_to_request: Any,
    block_table: Any,
    page_size: int,
    num_slots: int,
) -> None:
    entries, requests = np.asarray(topk_indices), np.asarray(token_to_request)
    num_requests = np.asarray(block_table).shape[0]
    for t in np.flatnonzero((requests < 0) | (requests >= num_requests))[:1]:
        raise ValueError(
            f"token_to_request must lie from 0 to {num_requests - 1}; got {requests[t]} for token "
            f"{t}"
        )
    there = entries >= 0
    for token, column in np.argwhere(there[:, 1:] & ~there[:, :-1])[:1]:
        raise ValueError(
            "topk_indices must have its entries packed to the left, as the length drops a row's "
            f"last columns; got {entries[token, column]} in column {column} of token {token} "
            f"before entry {entries[token, column + 1]}"
        )
    # Padding rows are made, and so looked up, like any other.
    for request in np.unique(requests):
        wanted = entries[requests == request]
        checks.check_table(
            block_table, "block_table", page_size, num_slots, int(request), wanted[wanted >= 0]
        )


def c128_topk_indices(
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    *,
    max_seq_len: int,
    max_model_len: int,
    compress_ratio: int = 128,
    num_tokens: int | None = None,
    validate: bool = True,
) -> Int32[Array, "T width"]:
    """For layers without an indexer, at prefill: each token chooses all entries that it sees.

    A row holds 0, 1, ... n - 1 and then -1, n = (pos + 1) // compress_ratio. It goes to
    `combine_topk_swa_indices` as topk_indices (vLLM 0.33.0, models/deepseek_v4/sparse_mla.py).

    Args:
      query_start_loc, seq_lens: [n + 1] and [n] int32, the batch.
      max_seq_len: longest context of the batch, max_model_len: of the model, both static: the
        width is the power of two at or above max_seq_len // compress_ratio, at least 128 and at
        most what the model needs, ceil(max_model_len / compress_ratio), up to a multiple of 128.
      num_tokens: T, static; None: as many as the requests have, which can't be asked inside jit.
        Rows past them are all -1.
      validate: looks at values outside jit, which waits for them.

    Raises:
      ValueError: an argument of the wrong type or range; outside jit also a token that sees more
        entries than the width.
    """
    num_requests = checks.batch_of(query_start_loc, seq_lens)
    width = c128_width(max_seq_len, max_model_len, compress_ratio)
    if width > checks.INT32_MAX:
        raise ValueError(
            "max_seq_len // compress_ratio must make lists of at most 2^31 - 1 columns, which an "
            f"int32 numbers; got {max_seq_len} // {compress_ratio}, which makes {width}"
        )
    num_tokens = checks.tokens_in(query_start_loc, num_tokens)
    if checks.known(validate, query_start_loc, seq_lens):
        checks.check_batch(query_start_loc, seq_lens, num_tokens)
        tokens = checks.host_tokens(query_start_loc, seq_lens)
        seen = (tokens.position + 1) // compress_ratio
        checks.check_lengths(seen, width, "max_seq_len and max_model_len")
    if not num_requests:
        return nothing_listed(num_tokens, width).indices
    return all_entries(
        *as_jax(query_start_loc=query_start_loc, seq_lens=seq_lens), compress_ratio,
        num_tokens=num_tokens, width=width,
    )  # fmt: skip


def c128_width(max_seq_len: int, max_model_len: int, compress_ratio: int = 128) -> int:
    """Columns of `c128_topk_indices`."""
    longest = checks.count(max_seq_len, "max_seq_len")
    model = checks.count(max_model_len, "max_model_len", least=1)
    ratio = checks.count(compress_ratio, "compress_ratio", least=1)
    needed = 1 << max(longest // ratio - 1, 0).bit_length()
    most = checks.round_up(-(-model // ratio), 128)
    return min(max(needed, 128), most)


@compiled_or_numpy("num_tokens", "width")
def all_entries(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    compress_ratio: Any,
    *,
    num_tokens: int,
    width: int,
) -> jax.Array:
    xp = namespace(query_start_loc)
    token = tokens_of(query_start_loc, seq_lens, num_tokens)
    seen = xp.where(token.real, (token.position + 1) // compress_ratio, 0)
    column = xp.arange(width, dtype=xp.int32)
    return xp.where(column < seen[:, None], column, -1)


def c128_global_slots(
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    block_table: Int32[Any, "n columns"],
    slot_mapping: Int32[Any, " T"],
    *,
    page_size: int,
    width: int,
    compress_ratio: int = 128,
    num_slots: int | None = None,
    validate: bool = True,
) -> IndexLists:
    """For layers without an indexer, at decode: the slots of all entries that each token sees.

    Entries 0 to n - 1 with n = (pos + 1) // compress_ratio, ascending (vLLM 0.33.0, models/
    deepseek_v4/sparse_mla.py).

    Args:
      block_table: [n, columns] int32 of the compressed cache.
      slot_mapping: [T] int32 of the tokens themselves, not of their entries. Negative is padding:
        its length is 0, and its row is made like any other.
      page_size: entries of a page (2 where a block holds 256 tokens).
      width: columns of the lists, static.
      The other arguments: as in `paged_swa_indices`.

    Raises:
      ValueError: an argument of the wrong type or range; outside jit also more entries than the
        width, a page outside of block_table or cache. Inside jit the list ends at the width.
    """
    batch = PagedBatch.checked(
        query_start_loc, seq_lens, block_table, slot_mapping,
        page_size=page_size, num_slots=num_slots,
    )  # fmt: skip
    width = checks.count(width, "width", least=1)
    compress_ratio = checks.count(compress_ratio, "compress_ratio", least=1)
    tokens = batch.known_tokens(validate)
    if tokens is not None:
        seen = (tokens.position + 1) // compress_ratio
        checks.check_lengths(seen, width, "width and compress_ratio")
        for request in np.unique(tokens.request):
            batch.check_pages(
                int(request), np.arange(seen[tokens.request == request].max(initial=0))
            )
    if not batch.num_requests:
        return nothing_listed(batch.num_tokens, width)
    return _c128_slots(batch.as_jax(), compress_ratio, width=width)


@compiled_or_numpy("width")
def _c128_slots(batch: PagedBatch, compress_ratio: Any, *, width: int) -> IndexLists:
    xp = namespace(batch.query_start_loc)
    entry = all_entries(
        batch.query_start_loc, batch.seq_lens, compress_ratio,
        num_tokens=batch.num_tokens, width=width,
    )  # fmt: skip
    token = tokens_of(batch.query_start_loc, batch.seq_lens, batch.num_tokens)
    slots = batch.slots_of(token.request[:, None], entry)
    seen = xp.clip((token.position + 1) // compress_ratio, 0, width)
    return IndexLists(slots, xp.where(token.real & (batch.slot_mapping >= 0), seen, 0))
