"""What single stages of the V4 prefill path must give, as arithmetic on their arguments.

Written from the engine's rules and not from an implementation; nothing is refused but what names a
place that isn't there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Int64, Shaped

from compare.suites.v4_stages import quantise
from compare.suites.v4_stages.call import V4StagesInputs

_WIDTH_MULTIPLE = 128
_DRAFT_WIDTH_MULTIPLE = 64
_V32_NOPE, _V32_GROUPS, _V32_ROPE, _V32_TOKEN = 512, 4, 528, 656
_NOPE, _GROUPS, _DATA, _SCALES, _BIAS = 448, 7, 576, 8, 127


def right_arrays(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    """The arrays that a stage must give back, by name; ValueError where its arguments name a place
    that isn't there.
    """
    return stage_arrays(inputs.stage, inputs.arguments)


def stage_arrays(stage: str, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a stage by its arguments; ValueError as of right_arrays."""
    return _RULES[stage](given)


def token_places(given: Mapping[str, Any]) -> tuple[Int64[np.ndarray, " T"], ...]:
    """The request and the position of each token of a batch."""
    starts = given["query_start_loc"].astype(np.int64)
    queries, lengths = np.diff(starts), given["seq_lens"].astype(np.int64)
    request = np.repeat(np.arange(len(queries)), queries)
    row = np.arange(len(request)) - (starts[:-1] - starts[0])[request]
    return request, (lengths - queries)[request] + row


def gathered_places(
    given: Mapping[str, Any], request: int
) -> tuple[Int64[np.ndarray, " k"], Int64[np.ndarray, " k"]]:
    """The rows of a request's workspace that a gather writes, and the positions that belong there.

    The last gather_lens of its seq_lens positions (all for None), from row `offset` on.
    """
    length = int(given["seq_lens"][request])
    lens = given.get("gather_lens")
    count = length if lens is None else int(lens[request])
    return given["offset"] + np.arange(count), length - count + np.arange(count)


def _combine(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """With pos a token's position and b its request: the first tl = min((pos + 1) // ratio, topk)
    entries of its list at M b + entry, right behind them positions ss to pos + right at
    M b + N + position - (seq - gather), then -1; ss = max(pos - max(window - 1, left), 0).
    """
    request, position = token_places(given)
    T, topk, window = len(request), given["topk"], given["window"]
    M, N = given["workspace_rows"], given["compressed_rows"]
    left, right = _reach(given, T)
    start = np.maximum(position - np.maximum(window - 1, left), 0)
    entries = np.minimum((position + 1) // given["compress_ratio"], topk)
    lengths = entries + position + right + 1 - start
    width = -(-(topk + window + given["max_image_tokens"]) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    column = np.arange(width)
    oldest = (given["seq_lens"].astype(np.int64) - given["gather_lens"])[request]
    rows = (M * request + N + start - oldest - entries)[:, None] + column
    indices = np.where(column < lengths[:, None], rows, -1)
    listed = given["topk_indices"][:, : min(topk, width)].astype(np.int64)
    k = listed.shape[1]
    own = column[:k] < entries[:, None]
    indices[:, :k] = np.where(own, M * request[:, None] + listed, indices[:, :k])
    return {"indices": indices.astype(np.int32), "lengths": lengths.astype(np.int32)}


def _global_topk(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Entry c at block_table[request, c // P] * P + c % P, a negative one at -1 in its place; the
    length counts the others, and is 0 for a token that isn't valid.
    """
    entries = given["topk_indices"].astype(np.int64)
    listed = entries >= 0
    request = np.broadcast_to(given["token_to_request"].astype(np.int64)[:, None], entries.shape)
    slots = np.full(entries.shape, -1, np.int64)
    slots[listed] = _slots(given, request[listed], entries[listed])
    lengths = np.where(given["is_valid_token"], listed.sum(axis=1), 0)
    return {"slots": slots.astype(np.int32), "lengths": lengths.astype(np.int32)}


def _paged_swa(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Positions max(pos - max(window - 1, left), 0, replay_start) to pos + right, ascending."""
    request, position = token_places(given)
    left, right = _reach(given, len(request))
    start = np.maximum(position - np.maximum(given["window"] - 1, left), 0)
    if given["replay_start"] is not None:
        start = np.maximum(start, given["replay_start"].astype(np.int64)[request])
    return slots_of_positions(given, start, position + right + 1, given["width"])


def _dspark(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """For every token of a request max(prefix - window, 0) to seq - 1: the block's own window."""
    request, _ = token_places(given)
    lengths = given["seq_lens"].astype(np.int64)
    start = np.maximum(lengths - np.diff(given["query_start_loc"]) - given["window"], 0)
    return slots_of_positions(given, start[request], lengths[request], draft_width(given))


def draft_width(given: Mapping[str, Any]) -> int:
    """Columns of the lists of a draft block."""
    columns = given["window"] + given["num_speculative_tokens"]
    return -(-columns // _DRAFT_WIDTH_MULTIPLE) * _DRAFT_WIDTH_MULTIPLE


def slots_of_positions(
    given: Mapping[str, Any], start: np.ndarray, end: np.ndarray, width: int
) -> dict[str, np.ndarray]:
    """The slots of positions [start, end) of each token and how many they are. A token whose
    slot_mapping is negative, and a row behind the batch's tokens, has none.
    """
    request, _ = token_places(given)
    T, mapped = len(request), given["slot_mapping"]
    lengths = np.zeros(len(mapped), np.int64)
    lengths[:T] = np.where(mapped[:T] >= 0, end - start, 0)
    listed = np.arange(width) < lengths[:, None]
    slots = np.full(listed.shape, -1, np.int64)
    token, column = np.nonzero(listed)
    slots[listed] = _slots(given, request[token], start[token] + column)
    return {"slots": slots.astype(np.int32), "lengths": lengths.astype(np.int32)}


def _c128(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Entries 0 to n - 1, n = min((pos + 1) // ratio, width), ascending. The length is n, and 0
    where slot_mapping is negative, whose row is written like any other.
    """
    request, position = token_places(given)
    width = given["width"]
    count = np.minimum((position + 1) // given["compress_ratio"], width)
    listed = np.arange(width) < count[:, None]
    slots = np.full(listed.shape, -1, np.int64)
    token, entry = np.nonzero(listed)
    slots[listed] = _slots(given, request[token], entry)
    lengths = np.where(given["slot_mapping"] >= 0, count, 0)
    return {"slots": slots.astype(np.int32), "lengths": lengths.astype(np.int32)}


def _reach(given: Mapping[str, Any], tokens: int) -> tuple[Int64[np.ndarray, " T"], ...]:
    """How many positions of its image each token has before and after its own."""
    none = np.zeros(tokens, np.int64)
    return tuple(
        none if given.get(name) is None else given[name][:tokens].astype(np.int64)
        for name in ("image_left", "image_right")
    )


def _gather(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tokens in bfloat16 at their rows; what stood in all other rows stays."""
    workspace, P = given["workspace"].copy(), given["page_size"]
    for request in range(len(workspace)):
        rows, position = gathered_places(given, request)
        page = _pages(given["block_table"], np.full(len(position), request), position, P)
        if len(page) and (page.min() < 0 or page.max() >= len(given["cache"])):
            raise ValueError(
                f"block_table: request {request} names pages {page.min()} to {page.max()}; "
                f"accepted are 0 to {len(given['cache']) - 1}"
            )
        workspace[request, rows] = _tokens(
            given["cache"], given["kv_format"], P, page, position % P
        )
    return {"workspace": workspace}


def _slots(
    given: Mapping[str, Any], request: np.ndarray, number: np.ndarray
) -> Int64[np.ndarray, " k"]:
    P = given["page_size"]
    return _pages(given["block_table"], request, number, P) * P + number % P


def _pages(
    table: np.ndarray, request: np.ndarray, number: np.ndarray, P: int
) -> Int64[np.ndarray, " k"]:
    column = number // P
    if len(column) and column.max() >= table.shape[1]:
        raise ValueError(
            f"block_table: {table.shape[1]} columns of pages of {P}; accepted are tokens 0 to "
            f"{table.shape[1] * P - 1}, not {number.max()}"
        )
    return table[request, column].astype(np.int64)


def _tokens(
    cache: np.ndarray, kv_format: str, P: int, page: np.ndarray, offset: np.ndarray
) -> Shaped[np.ndarray, "k D"]:
    """v4-fp8: on a page first 576 bytes of each token, 448 codes and 64 bfloat16, then 8 bytes of
    each, 7 scales of 2^(byte - 127) for 64 codes each. Byte 255 is NaN.
    """
    if kv_format in ("bf16", "bf16-576"):
        return cache[page, offset]
    if kv_format == "v3.2-fp8":
        return _v32_tokens(cache, page, offset)
    data = cache[page[:, None], offset[:, None] * _DATA + np.arange(_DATA)]
    scales = cache[page[:, None], P * _DATA + offset[:, None] * _SCALES + np.arange(_GROUPS)]
    codes = data[:, :_NOPE].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int64) - _BIAS))
    # Exact in float64, so that one rounding to bfloat16 is left.
    with np.errstate(over="ignore"):
        values = (codes * np.repeat(factors, _NOPE // _GROUPS, axis=1)).astype(np.float32)
    rope = np.ascontiguousarray(data[:, _NOPE:]).view(ml_dtypes.bfloat16)
    return np.concatenate([values.astype(ml_dtypes.bfloat16), rope], axis=1)


def _v32_tokens(
    cache: np.ndarray, page: np.ndarray, offset: np.ndarray
) -> Shaped[np.ndarray, "k 576"]:
    """656 bytes a token: 512 codes, 4 float32 scales of 128 codes each, 64 bfloat16."""
    data = cache[page[:, None], offset[:, None] * _V32_TOKEN + np.arange(_V32_TOKEN)]
    scales = np.ascontiguousarray(data[:, _V32_NOPE:_V32_ROPE]).view(np.float32)
    codes = data[:, :_V32_NOPE].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    # The float32 product, which is that of float64 rounded once, is rounded to bfloat16.
    with np.errstate(over="ignore"):
        products = codes * np.repeat(scales.astype(np.float64), _V32_NOPE // _V32_GROUPS, axis=1)
        values = products.astype(np.float32).astype(ml_dtypes.bfloat16)
    rope = np.ascontiguousarray(data[:, _V32_ROPE:]).view(ml_dtypes.bfloat16)
    return np.concatenate([values, rope], axis=1)


_RULES = {
    "combine": _combine,
    "global_topk": _global_topk,
    "gather": _gather,
    "paged_swa": _paged_swa,
    "c128": _c128,
    "dspark": _dspark,
    "quantise": quantise.due,
}
