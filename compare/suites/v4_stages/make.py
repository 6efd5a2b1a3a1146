"""Inputs of the suite ``v4-stages``: of a batch, or those stored with a recorded result."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from compare.generate import wide_tokens
from compare.generate.lists import positions, topk_indices
from compare.generate.pages import held_tokens, lay_out, write_tokens
from compare.generate.streams import Stream, below, raw, rows_of
from compare.generate.tokens import GROUPS, TOKEN_WORDS, Tokens, any_tokens
from compare.generate.v4_batch import WIDTH, V4Batch
from compare.suites.v4_stages import quantise, slot_lists
from compare.suites.v4_stages.call import Argument, V4StagesInputs
from compare.suites.v4_stages.case import V4StagesCase

RECORDED = "engine/vllm-0.33.0-stages"
"""The recorded results, with their inputs, under goldens/."""


def v4_stages_inputs(case: V4StagesCase) -> V4StagesInputs:
    """The arguments that a case describes. DamagedGolden, UnknownGolden or Unsupported where it is
    a recorded call and there is none such.
    """
    if case.recorded:
        from compare.suites.v4_stages.recorded import recorded_inputs

        return recorded_inputs(RECORDED, case)
    return V4StagesInputs(
        stage=case.stage, arguments=_MAKE[case.stage](case, case.batch()), case=case
    )


def _combine(case: V4StagesCase, batch: V4Batch) -> dict[str, Argument]:
    requests = range(len(batch.seq))
    lists = topk_indices(batch)
    compressed = max((0, *(batch.compressed(i, bound=True) for i in requests)))
    gathered = max((0, *(batch.gathered(i, bound=True) for i in requests)))
    arguments: dict[str, Argument] = {
        "topk_indices": np.zeros((batch.tokens, 0), np.int32) if lists is None else lists,
        "query_start_loc": np.cumsum((batch.start, *batch.q), dtype=np.int32),
        "seq_lens": np.array(batch.seq, np.int32),
        "gather_lens": np.array([batch.gathered(i) for i in requests], np.int32),
        "window": batch.window,
        "compress_ratio": batch.ratio,
        "topk": batch.listed,
        "workspace_rows": compressed + gathered,
        "compressed_rows": compressed,
        "image_left": None,
        "image_right": None,
        "max_image_tokens": batch.max_image,
    }
    if batch.images:
        request, position = positions(batch)
        reach = [
            batch.reach(i, p) for i, p in zip(request.tolist(), position.tolist(), strict=True)
        ]
        left, right = np.array(reach, np.int32).reshape(-1, 2).T
        arguments |= {"image_left": left.copy(), "image_right": right.copy()}
    return arguments


def _global_topk(case: V4StagesCase, batch: V4Batch) -> dict[str, Argument]:
    request, _ = positions(batch)
    lists = topk_indices(batch)
    assert lists is not None  # the case has a compressed cache
    layout = lay_out(batch, held_tokens(batch, compressed=True), compressed=True)
    # A token of no request is request 0's, and its list is whatever stands there.
    stray = (
        np.resize(lists, (case.pad, batch.topk)) if len(lists) else -np.ones((case.pad, batch.topk))
    )
    return {
        "topk_indices": np.concatenate([lists, stray]).astype(np.int32),
        "token_to_request": np.concatenate([request, np.zeros(case.pad)]).astype(np.int32),
        "block_table": layout.block_table,
        "page_size": batch.compressed_page,
        "is_valid_token": np.arange(batch.tokens + case.pad) < batch.tokens,
    }


def _gather(case: V4StagesCase, batch: V4Batch) -> dict[str, Argument]:
    """The cache holds every finite code, scales of 2^-37 to 2^13 (of v3.2-fp8 not only powers of
    two) and any finite bfloat16. In the workspace stand finite numbers, which must stay where
    nothing is gathered to.
    """
    compressed = batch.ratio > 1
    wide = batch.format in wide_tokens.FORMATS
    words, groups, width = (
        (wide_tokens.TOKEN_WORDS, wide_tokens.GROUPS, wide_tokens.WIDTH)
        if wide
        else (TOKEN_WORDS, GROUPS, WIDTH)
    )
    spans = held_tokens(batch, compressed=compressed)
    layout = lay_out(batch, spans, compressed=compressed)
    rows = np.cumsum((0, *(end for _, end in spans))).tolist()
    for request, (first, end) in enumerate(spans):

        def made(low: int, high: int, row: int = rows[request]) -> Tokens | wide_tokens.WideTokens:
            streams = (Stream.V4_WINDOW, words), (Stream.V4_WINDOW_SCALES, groups)
            drawn = (rows_of(batch.seed, s, row + low, row + high, n) for s, n in streams)
            return (wide_tokens.any_wide_tokens if wide else any_tokens)(*drawn)

        write_tokens(layout.cache, layout.block_table[request], first, end, made)
    lengths = [end for _, end in spans]
    taken = [end - first for first, end in spans]
    shape = (len(spans), case.offset + max((0, *taken)) + case.spare, width)
    before = below(raw(batch.seed, Stream.V4_WORKSPACE, 0, shape), 17) - 8
    return {
        "cache": layout.cache.array,
        "page_size": layout.cache.page,
        "kv_format": batch.format,
        "block_table": layout.block_table,
        "seq_lens": np.array(lengths, np.int32),
        "gather_lens": None if compressed else np.array(taken, np.int32),
        "offset": case.offset,
        "workspace": before.astype(np.float32).astype(ml_dtypes.bfloat16),
    }


_MAKE = {
    "combine": _combine,
    "global_topk": _global_topk,
    "gather": _gather,
    "paged_swa": slot_lists.paged_swa,
    "c128": slot_lists.c128,
    "dspark": slot_lists.dspark,
    "quantise": quantise.arguments,
}
