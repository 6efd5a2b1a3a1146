"""The arguments that both forms of the combined lists share, and what they may hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_impl.arrays import to_jax
from jax_impl.prefill.indices import checks

WIDTH_MULTIPLE = 128


def combined_width(topk: int, window: int, max_image_tokens: int = 0) -> int:
    """Columns of a combined list: topk + window + max_image_tokens, up to a multiple of 128.

    ValueError where that passes an int32.
    """
    return checks.list_width(
        WIDTH_MULTIPLE, topk=topk, window=window, max_image_tokens=max_image_tokens
    )


class Layout(NamedTuple):
    """The arguments that both forms share, their types checked."""

    topk_indices: Any
    query_start_loc: Any
    seq_lens: Any
    image_left: Any
    image_right: Any
    num_tokens: int
    topk: int
    compress_ratio: int
    window: int
    width: int

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self[:5]

    def as_jax(self) -> list[jax.Array]:
        return [to_jax(array, name) for array, name in zip(self, self._fields[:5], strict=False)]


def layout_of(
    topk_indices: Any,
    query_start_loc: Any,
    seq_lens: Any,
    image_left: Any,
    image_right: Any,
    *,
    compress_ratio: Any,
    topk: Any,
    window: Any,
    max_image_tokens: Any,
    num_tokens: Any,
) -> Layout:
    checks.batch_of(query_start_loc, seq_lens)
    columns = 0
    if topk_indices is not None:
        _, columns = checks.int32_shape(topk_indices, "topk_indices", "[T, topk]")
    topk = columns if topk is None else checks.count(topk, "topk")
    if topk > columns:
        raise ValueError(f"topk must be at most the {columns} columns of topk_indices; got {topk}")
    num_tokens = checks.tokens_in(
        query_start_loc,
        num_tokens,
        (topk_indices, "topk_indices"),
        (image_left, "image_left"),
        (image_right, "image_right"),
    )
    window = checks.count(window, "window", least=1)
    max_image_tokens = checks.count(max_image_tokens, "max_image_tokens")
    images = []
    for image, name in ((image_left, "image_left"), (image_right, "image_right")):
        if image is None:
            image = np.zeros(num_tokens, np.int32)
        checks.one_each(image, name, num_tokens, of="T")
        images.append(image)
    entries = np.zeros((num_tokens, 0), np.int32) if topk_indices is None else topk_indices
    return Layout(
        entries if topk == columns else entries[:, :topk],
        query_start_loc,
        seq_lens,
        *images,
        num_tokens=num_tokens,
        topk=topk,
        compress_ratio=checks.count(compress_ratio, "compress_ratio", least=1 if topk else 0),
        window=window,
        width=combined_width(topk, window, max_image_tokens),
    )


def check_lists(
    layout: Layout, num_entries: int, num_entries_name: str
) -> tuple[checks.HostTokens, np.ndarray]:
    """Refuses what the lists can't hold; the tokens and the first position of their windows."""
    checks.check_batch(layout.query_start_loc, layout.seq_lens, layout.num_tokens)
    tokens = checks.host_tokens(layout.query_start_loc, layout.seq_lens)
    real = len(tokens.request)
    left = np.asarray(layout.image_left, np.int64)[:real]
    right = np.asarray(layout.image_right, np.int64)[:real]
    queries = np.diff(np.asarray(layout.query_start_loc, np.int64))
    checks.check_images(tokens, layout.seq_lens, left, right, queries)
    limits = np.full(len(queries), num_entries)
    checks.check_entries(
        layout.topk_indices, tokens, max(layout.compress_ratio, 1), limits, num_entries_name
    )
    first, entries = _window_begin(layout, tokens, left), _num_entries(layout, tokens)
    lengths = entries + tokens.position + right - first + 1
    checks.check_lengths(lengths, layout.width, "topk, window and max_image_tokens")
    return tokens, first


def _window_begin(layout: Layout, tokens: checks.HostTokens, left: np.ndarray) -> np.ndarray:
    return np.maximum(tokens.position - np.maximum(layout.window - 1, left), 0)


def _num_entries(layout: Layout, tokens: checks.HostTokens) -> np.ndarray:
    return np.minimum((tokens.position + 1) // max(layout.compress_ratio, 1), layout.topk)


def check_gather(gather_lens: Any, seq_lens: Any, room: int) -> None:
    gathered, contexts = np.asarray(gather_lens, np.int64), np.asarray(seq_lens, np.int64)
    limits = np.minimum(contexts, room)
    for i in np.flatnonzero((gathered < 0) | (gathered > limits))[:1]:
        raise ValueError(
            f"gather_lens must lie between 0 and both seq_lens, {contexts[i]} here, and "
            f"workspace_rows - compressed_rows, {room}; got {gathered[i]} for request {i}"
        )


def check_tables(layout: Layout, caches: list[tuple[str, Any, int, int]]) -> None:
    tokens = checks.host_tokens(layout.query_start_loc, layout.seq_lens)
    real = len(tokens.request)
    left = np.asarray(layout.image_left, np.int64)[:real]
    last = tokens.position + np.asarray(layout.image_right, np.int64)[:real]
    first, counts = _window_begin(layout, tokens, left), _num_entries(layout, tokens)
    entries = np.asarray(layout.topk_indices)[:real]
    listed = np.arange(entries.shape[1]) < counts[:, None]
    for request in np.unique(tokens.request):
        mine = tokens.request == request
        wanted = {
            "swa": np.arange(first[mine].min(), last[mine].max() + 1),
            "compressed": np.unique(entries[mine][listed[mine]]),
        }
        for name, table, page_size, num_slots in caches:
            checks.check_table(
                table, f"{name}_block_table", page_size, num_slots, int(request), wanted[name]
            )
