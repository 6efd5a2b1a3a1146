"""The gather of prefill: the last keys of each request, dequantised, side by side in a workspace.

Source: vLLM's dequantize_and_gather_k_cache. It runs twice for a chunk: compressed entries from
column 0 on, then the window's and the query's own keys from column N on, each with a cache, page
size and block table of its own.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from torch_ref.arguments import require_tensor, shape_of
from torch_ref.kv_cache.cache import PagedKV, read_kv
from torch_ref.kv_cache.paging import position_slots


def gather_kv(
    paged: PagedKV,
    block_table: Int32[Tensor, "n columns"],
    seq_lens: Int32[Tensor, " n"],
    workspace: BFloat16[Tensor, "n M D"],
    *,
    gather_lens: Int32[Tensor, " n"] | None = None,
    offset: int = 0,
) -> BFloat16[Tensor, "n M D"]:
    """Writes into `workspace`, in place, and returns it.

    Of request b the last gather_lens[b] of its seq_lens[b] tokens (all of them for None): position
    seq_len - gather_len + i goes to workspace[b, offset + i]. Other rows stay as they were, and
    may be NaN or stale.

    ValueError: shapes, dtypes or devices that don't fit; a gather length below 0 or above its
    sequence length (its first position would be negative and read another page); rows past M,
    which are the next request's; a position past the block table, a page outside the cache.
    """
    require_tensor("workspace", workspace, torch.bfloat16)
    require_tensor("block_table", block_table, torch.int32)
    require_tensor("seq_lens", seq_lens, torch.int32)
    if gather_lens is None:
        gather_lens = seq_lens
    require_tensor("gather_lens", gather_lens, torch.int32)
    if workspace.ndim != 3 or workspace.shape[2] != paged.d:
        raise ValueError(f"workspace: shape {shape_of(workspace)}; accepted is [n, M, {paged.d}]")
    n, M, _ = workspace.shape
    if block_table.ndim != 2 or len(block_table) != n:
        raise ValueError(f"block_table: shape {shape_of(block_table)}; accepted is [{n}, columns]")
    for name, lengths in (("seq_lens", seq_lens), ("gather_lens", gather_lens)):
        if lengths.shape != (n,):
            raise ValueError(f"{name}: shape {shape_of(lengths)}; accepted is [{n}]")
    for name, tensor in (
        ("workspace", workspace),
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("gather_lens", gather_lens),
    ):
        if tensor.device != paged.cache.device:
            raise ValueError(f"{name}: on {tensor.device}; the cache is on {paged.cache.device}")
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise ValueError(f"offset: {offset!r}; accepted are 0 and more")

    for b, (length, count) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)):
        if not 0 <= count <= length:
            raise ValueError(
                f"gather_lens: {count} for request {b}; accepted are 0 to its length of {length}"
            )
        if offset + count > M:
            raise ValueError(
                f"gather_lens: {count} for request {b}, which from row {offset} on is past the "
                f"workspace's M = {M} rows of a request"
            )
        position = torch.arange(length - count, length, device=block_table.device)
        slots = position_slots(
            block_table,
            torch.full_like(position, b),
            position,
            page_size=paged.page_size,
            num_pages=paged.num_pages,
        )
        workspace[b, offset : offset + count] = read_kv(paged, slots)
    return workspace
