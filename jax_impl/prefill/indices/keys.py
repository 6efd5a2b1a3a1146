"""What each prefill token lists, before and after it is written down as rows or as slots.

Everything here runs inside jit, where no value can be looked at: whatever the values, a token
lists nothing but keys of its own request that it sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_impl.arrays import compiled_or_numpy, namespace
from jax_impl.prefill.indices.slots import column_of, first_slots, look_up
from jax_impl.prefill.indices.tokens import IndexLists, tokens_of


class Keys(NamedTuple):
    """The lists before they are written down: number of the key within its request, or -1."""

    request: jax.Array  # [T]
    entry: jax.Array  # [T, C] compressed entry
    position: jax.Array  # [T, C] position of the window; at most one of the two is not -1
    lengths: jax.Array  # [T]


def listed_keys(
    topk_indices: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    image_left: jax.Array,
    image_right: jax.Array,
    compress_ratio: Any,
    window: Any,
    *,
    width: int,
) -> Keys:
    """What each token lists. Nothing but its own request's visible keys, whatever the values."""
    xp = namespace(topk_indices)
    num_tokens, topk = topk_indices.shape
    token = tokens_of(query_start_loc, seq_lens, num_tokens)
    position = token.position[:, None]
    visible = xp.maximum((position + 1) // xp.maximum(xp.int32(compress_ratio), 1), 0)
    entries = xp.minimum(visible, topk)
    reach = xp.maximum(window - 1, image_left[:, None])
    first = xp.maximum(position - reach, 0)
    # Cut before it is added to: no sum may wrap around.
    count = xp.clip(position + image_right[:, None] - first + 1, 0, width)
    length = xp.where(token.real[:, None], entries + count, 0)

    column = xp.arange(width, dtype=xp.int32)
    listed = column < length
    entry = xp.pad(topk_indices, [(0, 0), (0, width - topk)], constant_values=-1)
    seen = listed & (column < entries) & (entry >= 0) & (entry < visible)
    at = first + column - entries
    there = listed & (column >= entries) & (at < seq_lens[token.request][:, None])
    return Keys(
        request=token.request,
        entry=xp.where(seen, entry, -1),
        position=xp.where(there, at, -1),
        lengths=xp.minimum(length[:, 0], width),
    )


@compiled_or_numpy("width")
def combined_rows(
    topk_indices: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    image_left: jax.Array,
    image_right: jax.Array,
    gather_lens: jax.Array,
    workspace_rows: Any,
    compressed_rows: Any,
    compress_ratio: Any,
    window: Any,
    *,
    width: int,
) -> IndexLists:
    keys = listed_keys(
        topk_indices, query_start_loc, seq_lens, image_left, image_right,
        compress_ratio, window, width=width,
    )  # fmt: skip
    xp = namespace(topk_indices)
    base = keys.request[:, None] * workspace_rows
    begin = (seq_lens - gather_lens)[keys.request][:, None]
    row = keys.position - begin
    gathered = (keys.position >= 0) & (row >= 0) & (row < workspace_rows - compressed_rows)
    rows = xp.where(gathered, base + compressed_rows + row, -1)
    compressed = (keys.entry >= 0) & (keys.entry < compressed_rows)
    return IndexLists(xp.where(compressed, base + keys.entry, rows), keys.lengths)


@compiled_or_numpy("width")
def combined_slots(
    topk_indices: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    image_left: jax.Array,
    image_right: jax.Array,
    swa_block_table: jax.Array,
    compressed_block_table: jax.Array,
    swa_page_size: Any,
    swa_num_slots: Any,
    compressed_page_size: Any,
    compressed_num_slots: Any,
    compress_ratio: Any,
    window: Any,
    *,
    width: int,
) -> IndexLists:
    keys = listed_keys(
        topk_indices, query_start_loc, seq_lens, image_left, image_right,
        compress_ratio, window, width=width,
    )  # fmt: skip
    xp = namespace(topk_indices)
    # Both tables side by side, and each key looked up once.
    compressed = first_slots(compressed_block_table, compressed_page_size, compressed_num_slots)
    swa = first_slots(swa_block_table, swa_page_size, swa_num_slots, before=compressed_num_slots)
    in_window, entry, position = keys.position >= 0, keys.entry, keys.position
    column = xp.where(
        in_window,
        compressed.shape[1] + column_of(position, swa_page_size, swa_block_table.shape[1]),
        column_of(entry, compressed_page_size, compressed_block_table.shape[1]),
    )
    offset = xp.where(in_window, position % swa_page_size, entry % compressed_page_size)
    tables = xp.concatenate([compressed, swa], axis=1)
    return IndexLists(look_up(tables, keys.request[:, None], column, offset), keys.lengths)
