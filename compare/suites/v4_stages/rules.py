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

from compare.suites.v4_stages.call import V4StagesInputs

_WIDTH_MULTIPLE = 128
_NOPE, _GROUPS, _DATA, _SCALES, _BIAS = 448, 7, 576, 8, 127


def right_arrays(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    """The arrays that a stage must give back, by name; ValueError where its arguments name a place
    that isn't there.
    """
    rule = {"combine": _combine, "global_topk": _global_topk, "gather": _gather}[inputs.stage]
    return rule(inputs.arguments)


def token_places(arguments: Mapping[str, Any]) -> tuple[Int64[np.ndarray, " T"], ...]:
    """The request and the position of each token of a combine."""
    starts = arguments["query_start_loc"].astype(np.int64)
    queries, lengths = np.diff(starts), arguments["seq_lens"].astype(np.int64)
    request = np.repeat(np.arange(len(queries)), queries)
    row = np.arange(len(request)) - (starts[:-1] - starts[0])[request]
    return request, (lengths - queries)[request] + row


def gathered_places(
    arguments: Mapping[str, Any], request: int
) -> tuple[Int64[np.ndarray, " k"], Int64[np.ndarray, " k"]]:
    """The rows of a request's workspace that a gather writes, and the positions that belong there.

    The last gather_lens of its seq_lens positions (all for None), from row `offset` on.
    """
    length = int(arguments["seq_lens"][request])
    lens = arguments.get("gather_lens")
    count = length if lens is None else int(lens[request])
    return arguments["offset"] + np.arange(count), length - count + np.arange(count)


def _combine(arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """With pos a token's position and b its request: the first tl = min((pos + 1) // ratio, topk)
    entries of its list at M b + entry, right behind them positions ss to pos + right at
    M b + N + position - (seq - gather), then -1; ss = max(pos - max(window - 1, left), 0).
    """
    request, position = token_places(arguments)
    T, topk, window = len(request), arguments["topk"], arguments["window"]
    M, N = arguments["workspace_rows"], arguments["compressed_rows"]
    none = np.zeros(T, np.int64)
    left, right = (
        none if arguments.get(name) is None else arguments[name].astype(np.int64)
        for name in ("image_left", "image_right")
    )
    start = np.maximum(position - np.maximum(window - 1, left), 0)
    entries = np.minimum((position + 1) // arguments["compress_ratio"], topk)
    lengths = entries + position + right + 1 - start
    width = -(-(topk + window + arguments["max_image_tokens"]) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    column = np.arange(width)
    oldest = (arguments["seq_lens"].astype(np.int64) - arguments["gather_lens"])[request]
    rows = (M * request + N + start - oldest - entries)[:, None] + column
    indices = np.where(column < lengths[:, None], rows, -1)
    listed = arguments["topk_indices"][:, : min(topk, width)].astype(np.int64)
    k = listed.shape[1]
    own = column[:k] < entries[:, None]
    indices[:, :k] = np.where(own, M * request[:, None] + listed, indices[:, :k])
    return {"indices": indices.astype(np.int32), "lengths": lengths.astype(np.int32)}


def _global_topk(arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Entry c at block_table[request, c // P] * P + c % P, a negative one at -1 in its place; the
    length counts the others, and is 0 for a token that isn't valid.
    """
    entries, P = arguments["topk_indices"].astype(np.int64), arguments["page_size"]
    listed = entries >= 0
    request = np.broadcast_to(
        arguments["token_to_request"].astype(np.int64)[:, None], entries.shape
    )
    slots = np.full(entries.shape, -1, np.int64)
    page = _pages(arguments["block_table"], request[listed], entries[listed], P)
    slots[listed] = page * P + entries[listed] % P
    lengths = np.where(arguments["is_valid_token"], listed.sum(axis=1), 0)
    return {"slots": slots.astype(np.int32), "lengths": lengths.astype(np.int32)}


def _gather(arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tokens in bfloat16 at their rows; what stood in all other rows stays."""
    workspace, P = arguments["workspace"].copy(), arguments["page_size"]
    for request in range(len(workspace)):
        rows, position = gathered_places(arguments, request)
        page = _pages(arguments["block_table"], np.full(len(position), request), position, P)
        if len(page) and (page.min() < 0 or page.max() >= len(arguments["cache"])):
            raise ValueError(
                f"block_table: request {request} names pages {page.min()} to {page.max()}; "
                f"accepted are 0 to {len(arguments['cache']) - 1}"
            )
        workspace[request, rows] = _tokens(
            arguments["cache"], arguments["kv_format"], P, page, position % P
        )
    return {"workspace": workspace}


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
) -> Shaped[np.ndarray, "k 512"]:
    """v4-fp8: on a page first 576 bytes of each token, 448 codes and 64 bfloat16, then 8 bytes of
    each, 7 scales of 2^(byte - 127) for 64 codes each. Byte 255 is NaN.
    """
    if kv_format == "bf16":
        return cache[page, offset]
    data = cache[page[:, None], offset[:, None] * _DATA + np.arange(_DATA)]
    scales = cache[page[:, None], P * _DATA + offset[:, None] * _SCALES + np.arange(_GROUPS)]
    codes = data[:, :_NOPE].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int64) - _BIAS))
    # Exact in float64, so that one rounding to bfloat16 is left.
    with np.errstate(over="ignore"):
        values = (codes * np.repeat(factors, _NOPE // _GROUPS, axis=1)).astype(np.float32)
    rope = np.ascontiguousarray(data[:, _NOPE:]).view(ml_dtypes.bfloat16)
    return np.concatenate([values.astype(ml_dtypes.bfloat16), rope], axis=1)
