"""The index lists of prefill: rows of a chunk's workspace, compressed entries before the window."""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from torch_ref.indices.batch import TokenBatch, token_batch
from torch_ref.indices.checks import first_true, list_width, one_device, table, vector, whole
from torch_ref.indices.visibility import check_visibility, visible_entries, window_positions
from torch_ref.kv_cache.paging import MAX_INT32

# What FlashMLA's widest sparse prefill kernel asks of a list's width.
WIDTH_MULTIPLE = 128


def combined_width(topk: int, window: int, max_image_tokens: int) -> int:
    """C of combine_topk_swa_indices; ValueError where it passes int32."""
    return list_width(WIDTH_MULTIPLE, topk=topk, window=window, max_image_tokens=max_image_tokens)


def combine_topk_swa_indices(
    topk_indices: Int32[Tensor, "T columns"] | None,
    query_start_loc: Int32[Tensor, " n+1"],
    seq_lens: Int32[Tensor, " n"],
    gather_lens: Int32[Tensor, " n"],
    *,
    window: int,
    compress_ratio: int,
    topk: int,
    workspace_rows: int,
    compressed_rows: int,
    image_left: Int32[Tensor, " T"] | None = None,
    image_right: Int32[Tensor, " T"] | None = None,
    max_image_tokens: int = 0,
) -> tuple[Int32[Tensor, "T C"], Int32[Tensor, " T"]]:
    """Each token's rows of the workspace viewed as [n * M, D]: (indices, lengths).

    M = workspace_rows and N = compressed_rows are the chunk's: request b's entries lie in rows
    M*b to M*b + N - 1, its last gather_lens[b] positions from row M*b + N on. A token at pos is
    given the first min((pos + 1) // ratio, topk) of topk_indices, as listed, and right behind them
    the positions that it sees, ascending. C is topk + window + max_image_tokens rounded up to 128;
    columns past a token's length are -1. topk 0 uses no entries, whatever topk_indices holds; rows
    count from query_start_loc's first entry. image_left and image_right are image_visibility's.

    Source: vLLM's combine_topk_swa_indices, which trusts its arguments. Refused with a ValueError:
    a listed entry that the token can't see or that was not gathered (a -1 would become the last row
    of the request before), a window that starts before the gathered rows (it would reach into the
    compressed ones), rows past M, lists wider than C, rows beyond int32.
    """
    batch = token_batch(query_start_loc, seq_lens)
    n = len(batch.seq_lens)
    vector("gather_lens", gather_lens, n)
    window, topk = whole("window", window, 1), whole("topk", topk, 0)
    ratio = whole("compress_ratio", compress_ratio, 1)
    N = whole("compressed_rows", compressed_rows, 0)
    M = whole("workspace_rows", workspace_rows, N)
    max_image_tokens = whole("max_image_tokens", max_image_tokens, 0)
    C = combined_width(topk, window, max_image_tokens)
    check_visibility(batch, image_left, image_right)
    one_device(
        query_start_loc=query_start_loc,
        gather_lens=gather_lens,
        topk_indices=topk_indices,
        image_left=image_left,
        image_right=image_right,
    )
    if n * M > MAX_INT32:
        raise ValueError(
            f"workspace_rows: {M} for each of {n} requests; accepted are {MAX_INT32} rows in all, "
            "which int32 holds"
        )
    entries = visible_entries(batch.position, compress_ratio=ratio, topk=topk)  # T
    start, end = window_positions(
        batch.position, window=window, image_left=image_left, image_right=image_right
    )
    gathered = batch.of_token(tuple(gather_lens.tolist()))
    first = batch.of_token(batch.seq_lens) - gathered  # T: the position in row M*b + N
    _check_gathered(batch, start, first, gathered, M - N)
    lengths = entries + end - start
    if bool((lengths > C).any()):
        (t,) = first_true(lengths > C)
        raise ValueError(
            f"max_image_tokens: {max_image_tokens}, so that lists are {C} wide; token {t} sees "
            f"{int(lengths[t])} keys"
        )

    base = M * batch.request[:, None]  # T 1
    column = torch.arange(C, device=base.device)  # C
    indices = (base + N + (start - first - entries)[:, None] + column).masked_fill(
        column >= lengths[:, None], -1
    )
    if topk:
        listed = listed_entries(topk_indices, batch, entries, ratio=ratio, gathered_entries=N)
        width = listed.shape[1]
        head = indices[:, :width]
        indices[:, :width] = torch.where(column[:width] < entries[:, None], listed + base, head)
    return indices.int(), lengths.int()


def listed_entries(
    topk_indices: Tensor | None,
    batch: TokenBatch,
    entries: Int64[Tensor, " T"],
    *,
    ratio: int,
    gathered_entries: int | None = None,
) -> Int64[Tensor, "T k"]:
    """The first k = max(entries) columns of topk_indices, of which token t's list is entries[t].

    ValueError unless each listed entry is one that its token sees, and below gathered_entries.
    """
    k = int(entries.max()) if len(entries) else 0
    if topk_indices is None:
        raise ValueError("topk_indices: None; accepted is [T, topk] for a layer with a top-k")
    table("topk_indices", topk_indices, batch.tokens)
    if topk_indices.shape[1] < k:
        raise ValueError(
            f"topk_indices: {topk_indices.shape[1]} columns; a token's list holds {k} entries"
        )
    listed = topk_indices[:, :k].long()
    visible = (batch.position + 1) // ratio
    if gathered_entries is not None:
        visible = visible.clamp(max=gathered_entries)
    column = torch.arange(k, device=listed.device)
    wrong = (column < entries[:, None]) & ((listed < 0) | (listed >= visible[:, None]))
    if bool(wrong.any()):
        t, c = first_true(wrong)
        raise ValueError(
            f"topk_indices: {int(listed[t, c])} in column {c} of token {t}, whose list is its "
            f"first {int(entries[t])} columns; accepted are entries 0 to {int(visible[t]) - 1}"
        )
    return listed


def _check_gathered(
    batch: TokenBatch, start: Tensor, first: Tensor, gathered: Tensor, room: int
) -> None:
    early = start < first
    if bool(early.any()):
        (t,) = first_true(early)
        raise ValueError(
            f"gather_lens: {int(gathered[t])} for request {int(batch.request[t])}, whose token {t} "
            f"sees position {int(start[t])}; the first gathered one is {int(first[t])}"
        )
    wrong = (first < 0) | (gathered > room)
    if bool(wrong.any()):
        (t,) = first_true(wrong)
        i = int(batch.request[t])
        raise ValueError(
            f"gather_lens: {int(gathered[t])} for request {i} of {batch.seq_lens[i]} tokens; "
            f"accepted are at most its tokens and the {room} rows that the workspace has for them"
        )
