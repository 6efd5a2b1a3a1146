"""The sliding window as slots of a paged cache, for decode and for prefill without a gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from torch_ref.arguments import require_tensor, shape_of
from torch_ref.indices.batch import TokenBatch, token_batch
from torch_ref.indices.checks import first_true, list_width, one_device, table, whole
from torch_ref.indices.visibility import check_visibility, window_positions
from torch_ref.kv_cache.paging import position_slots

# FlashMLA's sparse decode takes lists whose width is a multiple of this.
WIDTH_MULTIPLE = 64


def paged_swa_indices(
    query_start_loc: Int32[Tensor, " n+1"],
    seq_lens: Int32[Tensor, " n"],
    block_table: Int32[Tensor, "n columns"],
    *,
    page_size: int,
    window: int = 128,
    width: int | None = None,
    slot_mapping: Int[Tensor, " T"] | None = None,
    image_left: Int32[Tensor, " t"] | None = None,
    image_right: Int32[Tensor, " t"] | None = None,
    max_image_tokens: int = 0,
    replay_start: Sequence[int] | None = None,
) -> tuple[Int32[Tensor, "T width"], Int32[Tensor, " T"]]:
    """Each token's window as slots of the cache, ascending positions, -1 behind: (slots, lengths).

    A token at pos sees [max(pos - (window - 1), replay_start of its request, 0), pos], an image's
    tokens as far as image_left and image_right. width None is window + max_image_tokens rounded up
    to 64; it is the list's, never the window. slot_mapping has one entry for each of T rows, of
    which those below 0 are padding: all -1, length 0; None: the batch's t tokens, none is padding.
    Rows past the batch's tokens must be padding. Source: vLLM's sparse_swa.py.

    ValueError where the engine leaves it undefined: a list longer than width (its length isn't
    cut with its columns), a replay_start past the token (the length would be negative).
    """
    batch = token_batch(query_start_loc, seq_lens)
    page_size, window = whole("page_size", page_size, 1), whole("window", window, 1)
    check_visibility(batch, image_left, image_right)
    one_device(query_start_loc=query_start_loc, image_left=image_left, image_right=image_right)
    if width is None:
        more = whole("max_image_tokens", max_image_tokens, 0)
        width = list_width(WIDTH_MULTIPLE, window=window, max_image_tokens=more)
    start, end = window_positions(
        batch.position, window=window, image_left=image_left, image_right=image_right
    )
    if replay_start is not None:
        if len(replay_start) != len(batch.seq_lens):
            raise ValueError(
                f"replay_start: {len(replay_start)} requests; query_start_loc has "
                f"{len(batch.seq_lens)}"
            )
        replay = batch.of_token(tuple(whole("replay_start", r, 0) for r in replay_start))
        late = replay > end
        if bool(late.any()):
            (t,) = first_true(late)
            raise ValueError(
                f"replay_start: {int(replay[t])} for request {int(batch.request[t])}, whose token "
                f"{t} sees positions below {int(end[t])} only"
            )
        start = torch.maximum(start, replay)
    return _slots(batch, start, end, block_table, page_size, whole("width", width, 0), slot_mapping)


def dspark_indices(
    query_start_loc: Int32[Tensor, " n+1"],
    seq_lens: Int32[Tensor, " n"],
    block_table: Int32[Tensor, "n columns"],
    *,
    page_size: int,
    window: int = 128,
    num_spec: int,
    slot_mapping: Int[Tensor, " T"] | None = None,
) -> tuple[Int32[Tensor, "T width"], Int32[Tensor, " T"]]:
    """The non-causal draft block: every token of a request sees one range, the block included.

    Positions [max(prefix - window, 0), seq_len), anchored to the block's start; width is window +
    num_spec rounded up to 64. slot_mapping as in paged_swa_indices. Source: vLLM's
    compressor_utils.py.

    ValueError: a block that doesn't fit the width, whose length the engine wouldn't cut.
    """
    batch = token_batch(query_start_loc, seq_lens)
    page_size, window = whole("page_size", page_size, 1), whole("window", window, 1)
    drafted = whole("num_spec", num_spec, 0)
    width = list_width(WIDTH_MULTIPLE, window=window, num_spec=drafted)
    start = (batch.of_token(batch.prefixes) - window).clamp(min=0)
    end = batch.of_token(batch.seq_lens)
    return _slots(batch, start, end, block_table, page_size, width, slot_mapping)


def _slots(
    batch: TokenBatch,
    start: Tensor,
    end: Tensor,
    block_table: Tensor,
    page_size: int,
    width: int,
    slot_mapping: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Slots of positions [start, end) of each token, -1 behind them, and their number."""
    table("block_table", block_table, len(batch.seq_lens))
    one_device(query_start_loc=batch.position, block_table=block_table)
    real = _real_tokens(batch, slot_mapping)  # T
    T, t = len(real), batch.tokens
    lengths = (end - start).masked_fill(~real[:t], 0)
    if bool((lengths > width).any()):
        (token,) = first_true(lengths > width)
        raise ValueError(
            f"width: {width}; token {token} sees {int(lengths[token])} positions, and a length "
            "past the width would count columns that aren't there"
        )
    column = torch.arange(width, device=start.device)
    listed = column < lengths[:, None]  # t width
    slots = torch.full((T, width), -1, dtype=torch.int32, device=start.device)
    position = (start[:, None] + column)[listed]
    request = batch.request[:, None].expand(t, width)[listed]
    slots[:t][listed] = position_slots(block_table, request, position, page_size=page_size).int()
    all_lengths = torch.zeros(T, dtype=torch.int32, device=start.device)
    all_lengths[:t] = lengths.int()
    return slots, all_lengths


def _real_tokens(batch: TokenBatch, slot_mapping: Tensor | None) -> Tensor:
    """Which rows are no padding, bool [T]."""
    t = batch.tokens
    if slot_mapping is None:
        return torch.ones(t, dtype=torch.bool, device=batch.position.device)
    require_tensor("slot_mapping", slot_mapping, torch.int32, torch.int64)
    if slot_mapping.ndim != 1 or len(slot_mapping) < t:
        raise ValueError(
            f"slot_mapping: shape {shape_of(slot_mapping)}; accepted is [T] with at least the "
            f"{t} tokens of query_start_loc"
        )
    one_device(query_start_loc=batch.position, slot_mapping=slot_mapping)
    real = slot_mapping >= 0
    if bool(real[t:].any()):
        (extra,) = first_true(real[t:])
        raise ValueError(
            f"slot_mapping: {int(slot_mapping[t + extra])} for row {t + extra}; query_start_loc "
            f"counts {t} tokens, accepted behind them is -1"
        )
    return real
