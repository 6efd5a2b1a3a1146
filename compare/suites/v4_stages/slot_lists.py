"""Arguments of the stages that list slots of a paged cache: paged_swa, c128 and dspark."""

from __future__ import annotations

import numpy as np

from compare.generate.lists import positions
from compare.generate.pages import held_tokens, lay_out
from compare.generate.streams import Stream, raw
from compare.generate.v4_batch import V4Batch
from compare.suites.v4_stages.call import Argument
from compare.suites.v4_stages.case import V4StagesCase

_WIDTH_MULTIPLE = 64
"""FlashMLA's sparse decode takes lists whose width is a multiple of this."""


def paged_swa(case: V4StagesCase, batch: V4Batch) -> dict[str, Argument]:
    """Each token's window; the cache holds the positions that some token sees."""
    layout = lay_out(batch, held_tokens(batch, compressed=False), compressed=False)
    reach = np.zeros((2, batch.tokens + case.spare), np.int32)
    for t, (request, position) in enumerate(zip(*positions(batch), strict=True)):
        reach[:, t] = batch.reach(int(request), int(position))
    prefixes = np.subtract(batch.seq, batch.q)
    return _batch(case, batch, layout.block_table) | {
        "page_size": batch.page,
        "window": batch.window,
        "width": -(-(batch.window + batch.max_image) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE,
        "replay_start": np.minimum(case.replay, prefixes).astype(np.int32) if case.replay else None,
        "image_left": reach[0] if batch.images else None,
        "image_right": reach[1] if batch.images else None,
    }


def c128(case: V4StagesCase, batch: V4Batch) -> dict[str, Argument]:
    """All entries of the compressed cache that a token sees, in lists of topk columns."""
    layout = lay_out(batch, held_tokens(batch, compressed=True), compressed=True)
    return _batch(case, batch, layout.block_table) | {
        "page_size": batch.compressed_page,
        "width": batch.topk,
        "compress_ratio": batch.ratio,
    }


def dspark(case: V4StagesCase, batch: V4Batch) -> dict[str, Argument]:
    """A draft block of each request; the cache holds `window` positions before it, and it."""
    spans = [
        (max(length - queries - batch.window, 0), length)
        for length, queries in zip(batch.seq, batch.q, strict=True)
    ]
    layout = lay_out(batch, spans, compressed=False)
    return _batch(case, batch, layout.block_table) | {
        "page_size": batch.page,
        "window": batch.window,
        "num_speculative_tokens": max((0, *batch.q)),
    }


def slot_mapping(case: V4StagesCase, slots: np.ndarray) -> np.ndarray:
    """The slots of the batch's tokens, with -1 for `pad` of them, drawn, and for spare rows."""
    order = np.argsort(raw(case.seed, Stream.V4_PADDING, 0, slots.shape), kind="stable")
    mapped = np.concatenate([slots, np.full(case.spare, -1)]).astype(np.int32)
    mapped[order[: case.pad]] = -1
    return mapped


def _batch(case: V4StagesCase, batch: V4Batch, block_table: np.ndarray) -> dict[str, Argument]:
    return {
        "query_start_loc": np.cumsum((batch.start, *batch.q), dtype=np.int32),
        "seq_lens": np.array(batch.seq, np.int32),
        "block_table": block_table,
        # Only its sign is looked at.
        "slot_mapping": slot_mapping(case, np.arange(batch.tokens)),
    }
