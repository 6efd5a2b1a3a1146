"""The whole V4 prefill batch as one plain sparse prefill: no plan, no workspace, no chunk.

Each token's keys are read off the definition: the compressed entries of its list, then the
positions that it sees. This is what the judge gives the float64 oracle, so it shares nothing with
the pipeline but the check of the arguments and the reading of single slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from torch_ref.calls import called_with
from torch_ref.kv_cache import PagedKV, position_slots, read_kv
from torch_ref.v4.inputs import V4Call, V4Inputs, check_call


class FlatCall(NamedTuple):
    """kv [S, 512] bf16, indices [T, K] int32 and topk_length [T] int32 of a sparse prefill."""

    kv: BFloat16[Tensor, "S 512"]
    indices: Int32[Tensor, "T K"]
    topk_length: Int32[Tensor, " T"]


@called_with(V4Call)
def flat_v4_call(call: V4Call) -> FlatCall:
    """Gives the arguments that sparse prefill needs besides q, sm_scale and attn_sink.

    kv holds, request by request, of those with query tokens: its compressed entries from 0 on,
    then its positions from the first that any of its tokens sees to its last, dequantised. Row t
    of indices names token t's keys: its compressed entries in the order of its list, then its
    positions, ascending; -1 from topk_length[t] on. K is the longest list.

    Arguments and errors are check_v4_inputs'; a page that a key lies on must be in the cache.
    """
    return flatten(check_call(call))


def flatten(inputs: V4Inputs) -> FlatCall:
    """flat_v4_call of checked inputs."""
    batch, ratio, window = inputs.batch, inputs.compress_ratio, inputs.window
    chosen = None if inputs.topk_indices is None else inputs.topk_indices.cpu()
    lefts, rights = (
        [0] * inputs.tokens if counts is None else counts.tolist()
        for counts in (inputs.image_left, inputs.image_right)
    )
    kv: list[Tensor] = []
    lists: list[Tensor] = []
    rows = 0
    for i, (length, queries) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        if not queries:
            continue
        prefix = length - queries
        # An image lies within the query, so no token sees further back than the first token.
        oldest = max(prefix - (window - 1), 0)
        entries = inputs.compressed_lens[i]
        if inputs.compressed is not None and inputs.compressed_block_table is not None:
            kv.append(
                _read(
                    "compressed_", inputs.compressed, inputs.compressed_block_table, i, 0, entries
                )
            )
        kv.append(_read("swa_", inputs.swa, inputs.swa_block_table, i, oldest, length))
        for t in range(batch.first_rows[i], batch.first_rows[i] + queries):
            position = prefix + t - batch.first_rows[i]
            first = max(min(position - (window - 1), position - lefts[t]), 0)
            last = position + rights[t]
            keys = rows + entries + torch.arange(first - oldest, last + 1 - oldest)
            if chosen is not None:
                listed = min((position + 1) // ratio, chosen.shape[1])
                keys = torch.cat([rows + chosen[t, :listed].long(), keys])
            lists.append(keys)
        rows += entries + length - oldest

    device = inputs.q.device
    K = max((len(keys) for keys in lists), default=0)
    indices = torch.full((len(lists), K), -1, dtype=torch.int32)
    for t, keys in enumerate(lists):
        indices[t, : len(keys)] = keys
    lengths = torch.tensor([len(keys) for keys in lists], dtype=torch.int32)
    everything = torch.cat(kv) if kv else inputs.q.new_zeros(0, inputs.swa.d)
    return FlatCall(everything, indices.to(device), lengths.to(device))


def _read(prefix: str, paged: PagedKV, table: Tensor, request: int, start: int, end: int) -> Tensor:
    """Tokens [start, end) of one request."""
    position = torch.arange(start, end, device=table.device)
    slots = position_slots(
        table,
        torch.full_like(position, request),
        position,
        page_size=paged.page_size,
        num_pages=paged.num_pages,
        name=f"{prefix}block_table",
    )
    return read_kv(paged, slots)
