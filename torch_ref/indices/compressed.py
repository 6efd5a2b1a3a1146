"""Compressed entries: those of prefill as numbers, those of decode as slots of the paged cache."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from torch_ref.indices.batch import token_batch
from torch_ref.indices.checks import first_true, one_device, round_up, table, vector, whole
from torch_ref.kv_cache.paging import position_slots

_ALL_ENTRIES_MULTIPLE = 128


def c128_topk_indices(
    query_start_loc: Int32[Tensor, " n+1"],
    seq_lens: Int32[Tensor, " n"],
    *,
    max_model_len: int,
    max_seq_len: int | None = None,
    compress_ratio: int = 128,
) -> Int32[Tensor, "T width"]:
    """Prefill's list of a layer that has no indexer: all n = (pos + 1) // ratio entries in order.

    Row [0, 1, .., n - 1, -1, ..]. The width is the next power of two of max_seq_len // ratio (the
    batch's longest length for None), at least 128 and at most ceil(max_model_len / ratio) rounded
    up to 128. Source: vLLM's deepseek_v4/sparse_mla.py.

    ValueError: a max_seq_len below a length of the batch or above max_model_len, whose entries the
    width wouldn't hold.
    """
    batch = token_batch(query_start_loc, seq_lens)
    ratio = whole("compress_ratio", compress_ratio, 1)
    max_model_len = whole("max_model_len", max_model_len, 1)
    longest = max(batch.seq_lens, default=0)
    if max_seq_len is None:
        max_seq_len = longest
    if not longest <= max_seq_len <= max_model_len:
        raise ValueError(
            f"max_seq_len: {max_seq_len}; accepted are {longest}, the longest length, to "
            f"max_model_len = {max_model_len}"
        )
    power = 1 << (max(max_seq_len // ratio, 1) - 1).bit_length()
    most = round_up(-(-max_model_len // ratio), _ALL_ENTRIES_MULTIPLE)
    width = min(max(power, _ALL_ENTRIES_MULTIPLE), most)
    column = torch.arange(width, device=batch.position.device)
    count = (batch.position + 1) // ratio
    return torch.where(column < count[:, None], column, -1).int()


def global_topk_slots(
    topk_indices: Int32[Tensor, "T K"],
    token_to_request: Int32[Tensor, " T"],
    block_table: Int32[Tensor, "n columns"],
    *,
    page_size: int,
    is_valid_token: Bool[Tensor, " T"] | None = None,
) -> tuple[Int32[Tensor, "T K"], Int32[Tensor, " T"]]:
    """Decode's top-k entries as slots of the compressed cache: (slots, lengths).

    Entry c of a token becomes block_table[request, c // P] * P + c % P, P = page_size being the
    compressed cache's (entries, not tokens). A negative entry stays -1 in its place. The length
    counts the others; 0 for a token that isn't valid (padding), whose row keeps its slots. Source:
    vLLM's compute_global_topk_indices_and_lens.

    ValueError: a negative entry before another one of a valid token. The length cuts the list from
    its right end, so entries behind a hole would be lost.
    """
    table("topk_indices", topk_indices, None)
    T, K = topk_indices.shape
    vector("token_to_request", token_to_request, T)
    table("block_table", block_table, None)
    page_size = whole("page_size", page_size, 1)
    if is_valid_token is None:
        is_valid_token = torch.ones(T, dtype=torch.bool, device=topk_indices.device)
    vector("is_valid_token", is_valid_token, T, torch.bool)
    one_device(
        topk_indices=topk_indices,
        token_to_request=token_to_request,
        block_table=block_table,
        is_valid_token=is_valid_token,
    )
    _require_requests(token_to_request, block_table)
    listed = topk_indices >= 0
    count = listed.sum(1)
    column = torch.arange(K, device=listed.device)
    holes = is_valid_token[:, None] & ~listed & (column < count[:, None])
    if bool(holes.any()):
        t, c = first_true(holes)
        raise ValueError(
            f"topk_indices: {int(topk_indices[t, c])} in column {c} of token {t}, before others of "
            f"its {int(count[t])} entries; accepted are lists without holes"
        )
    slots = torch.full_like(topk_indices, -1)
    request = token_to_request[:, None].expand(T, K)[listed]
    slots[listed] = position_slots(
        block_table, request, topk_indices[listed], page_size=page_size
    ).int()
    return slots, count.masked_fill(~is_valid_token, 0).int()


def c128_global_slots(
    positions: Int[Tensor, " T"],
    token_to_request: Int32[Tensor, " T"],
    block_table: Int32[Tensor, "n columns"],
    *,
    page_size: int,
    width: int,
    slot_mapping: Int[Tensor, " T"] | None = None,
    compress_ratio: int = 128,
) -> tuple[Int32[Tensor, "T width"], Int32[Tensor, " T"]]:
    """Decode's slots of all entries, for a layer without an indexer: (slots, lengths).

    Token t at positions[t] is given the slots of entries 0 to n - 1, n = (pos + 1) // ratio, and
    -1 behind them. The length is n, but 0 where slot_mapping (one a token, of the uncompressed
    cache) is below 0: padding, whose row is written all the same. Source: vLLM's
    BuildC128ATopkMetadataKernel.

    ValueError: more entries than width, of which the engine keeps the first and drops the rest.
    """
    T = len(token_to_request)
    vector("token_to_request", token_to_request, T)
    vector("positions", positions, T, torch.int32, torch.int64)
    table("block_table", block_table, None)
    page_size, width = whole("page_size", page_size, 1), whole("width", width, 0)
    ratio = whole("compress_ratio", compress_ratio, 1)
    one_device(token_to_request=token_to_request, positions=positions, block_table=block_table)
    _require_requests(token_to_request, block_table)
    count = (positions.long() + 1) // ratio
    wrong = (positions < 0) | (count > width)
    if bool(wrong.any()):
        (t,) = first_true(wrong)
        raise ValueError(
            f"positions: {int(positions[t])} for token {t}, which makes {int(count[t])} entries; "
            f"accepted are positions from 0 on with at most width = {width}"
        )
    column = torch.arange(width, device=count.device).expand(T, width)
    listed = column < count[:, None]
    slots = torch.full((T, width), -1, dtype=torch.int32, device=count.device)
    request = token_to_request[:, None].expand(T, width)[listed]
    slots[listed] = position_slots(block_table, request, column[listed], page_size=page_size).int()
    if slot_mapping is not None:
        vector("slot_mapping", slot_mapping, T, torch.int32, torch.int64)
        one_device(token_to_request=token_to_request, slot_mapping=slot_mapping)
        count = count.masked_fill(slot_mapping < 0, 0)
    return slots, count.int()


def _require_requests(token_to_request: Tensor, block_table: Tensor) -> None:
    wrong = (token_to_request < 0) | (token_to_request >= len(block_table))
    if bool(wrong.any()):
        (t,) = first_true(wrong)
        raise ValueError(
            f"token_to_request: {int(token_to_request[t])} for token {t}; accepted are requests 0 "
            f"to {len(block_table) - 1}"
        )
