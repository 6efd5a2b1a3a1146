"""Inputs of the suite ``v4-prefill``: the same bytes on every machine.

Keys are made by request and position, the compressed ones by request and entry, and laid on pages;
those of a request without query tokens, which nobody may look at, are NaN.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from compare.generate.blocks import in_blocks
from compare.generate.lists import topk_indices
from compare.generate.pages import held_tokens, lay_out, write_tokens
from compare.generate.streams import Stream, bell, raw, rows_of, scaled
from compare.generate.tokens import GROUPS, Tokens, drawn_tokens
from compare.generate.v4_batch import WIDTH
from compare.suites.v4_prefill.call import V4PrefillInputs
from compare.suites.v4_prefill.case import V4PrefillCase
from compare.suites.v4_prefill.exact import exact_marks, exact_q, exact_tokens

# Power of two that multiplies a bell of standard deviation 37837 to make q.
_EXPONENTS = {"normal": -15, "flat": -21, "peaked": -12}
_WINDOW = (Stream.V4_WINDOW, Stream.V4_WINDOW_SCALES)
_COMPRESSED = (Stream.V4_COMPRESSED, Stream.V4_COMPRESSED_SCALES)


def v4_prefill_inputs(case: V4PrefillCase) -> V4PrefillInputs:
    """The arguments that a case describes."""
    lists = topk_indices(case.batch)
    marks = exact_marks(case, lists) if case.data == "exact" else None
    swa_cache, swa_table = _cache(case, marks, compressed=False)
    cache = table = None
    if case.ratio > 1:
        cache, table = _cache(case, marks, compressed=True)
    lengths = np.array(case.seq, np.int32)
    return V4PrefillInputs(
        q=_queries(case),
        swa_cache=swa_cache,
        swa_block_table=swa_table,
        swa_page=case.page,
        compressed_cache=cache,
        compressed_block_table=table,
        compressed_page=None if case.ratio == 1 else case.batch.compressed_page,
        kv_format=case.format,
        topk_indices=lists,
        query_start_loc=np.cumsum((case.start, *case.q), dtype=np.int32),
        seq_lens=lengths,
        seq_lens_bound=lengths + np.int32(case.bound) if case.bound else None,
        attn_sink=_sink(case),
        sm_scale=case.scale,
        compress_ratio=case.ratio,
        window=case.window,
        image_spans=_image_spans(case),
        max_image_tokens=case.max_image,
        max_model_len=case.max_len,
        max_num_batched_tokens=case.max_tokens,
        chunk_size=case.chunk,
        plan_rules=case.plan,
        case=case,
    )


def _queries(case: V4PrefillCase) -> np.ndarray:
    width = case.h * WIDTH
    q = np.empty((case.tokens, case.h, WIDTH), ml_dtypes.bfloat16)

    def fill(start: int, end: int) -> None:
        if case.data == "exact":
            q[start:end] = exact_q(case, start, end)
        else:
            words = rows_of(case.seed, Stream.V4_Q, start, end, width)
            values = scaled(bell(words), _EXPONENTS[case.data])
            q[start:end] = values.reshape(end - start, case.h, WIDTH)

    in_blocks(fill, case.tokens, width)
    return q


def _cache(
    case: V4PrefillCase,
    marks: list[tuple[np.ndarray, np.ndarray]] | None,
    *,
    compressed: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """A cache and its block table. marks: see exact_marks."""
    spans = held_tokens(case.batch, compressed=compressed)
    layout = lay_out(case.batch, spans, compressed=compressed)
    cache = layout.cache
    numbers, scales = _COMPRESSED if compressed else _WINDOW
    rows = np.cumsum((0, *(end for _, end in spans))).tolist()
    for request, (first, end) in enumerate(spans):
        if case.poison and case.q[request] == 0:
            continue

        def made(low: int, high: int, row: int = rows[request], request: int = request) -> Tokens:
            words = rows_of(case.seed, numbers, row + low, row + high, WIDTH)
            scale_words = rows_of(case.seed, scales, row + low, row + high, GROUPS)
            if marks is None:
                return drawn_tokens(words, scale_words)
            first = spans[request][0]
            mark = marks[request][compressed][low - first : high - first]
            return exact_tokens(words, scale_words, mark)

        write_tokens(cache, layout.block_table[request], first, end, made)
    return cache.array, layout.block_table


def _image_spans(case: V4PrefillCase) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    if not case.images:
        return None
    return tuple(
        tuple((first, last) for owner, first, last in case.images if owner == request)
        for request in range(len(case.seq))
    )


def _sink(case: V4PrefillCase) -> np.ndarray | None:
    """[H] float32. mixed: 5 of 16 heads -inf, 5 of 16 +inf, the rest near the ln of how many keys a
    full list has, where a sink is visible.
    """
    if case.sink == "none":
        return None
    if case.sink != "mixed":
        value = 0.0 if case.sink == "zero" else float(case.sink)
        return np.full(case.h, value, np.float32)
    words = raw(case.seed, Stream.V4_SINK, 0, (case.h,))
    kind = words & np.uint64(15)
    doublings = (case.batch.listed + case.window).bit_length()
    finite = scaled(bell(words) + doublings * 45426, -16)  # 45426 / 2^16 = ln 2
    infinite = np.where(kind < 5, -np.inf, np.inf).astype(np.float32)
    return np.where(kind < 10, infinite, finite).astype(np.float32)
