"""Right, and without a plan or a workspace: each token's keys are read from the pages."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from right_v4 import entries, pages, reach, read, seen, softmax


def keys_of(cache, table, page_size, request, numbers):
    page, offset = pages(request, numbers, table, page_size)
    return read(cache, page_size, page, offset)


def v4_prefill(
    *, q, swa_cache, swa_block_table, swa_page, compressed_cache, compressed_block_table,
    compressed_page, topk_indices, query_start_loc, seq_lens, attn_sink, sm_scale, compress_ratio,
    window, image_spans, **_,
):  # fmt: skip
    T, H, _ = q.shape
    out = torch.zeros(T, H, 512, dtype=torch.bfloat16)
    max_logits, lse = torch.full((T, H), -torch.inf), torch.full((T, H), torch.inf)
    starts = (query_start_loc - query_start_loc[0]).tolist()
    for request, length in enumerate(seq_lens.tolist()):
        for t in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - t)
            left, right = reach(t, request, position, image_spans)
            first, end = seen(position, left, right, window)
            keys = keys_of(swa_cache, swa_block_table, swa_page, request, torch.arange(first, end))
            if compressed_cache is not None:
                count = entries(position, compress_ratio, topk_indices.shape[1])
                chosen = keys_of(
                    compressed_cache, compressed_block_table, compressed_page, request,
                    topk_indices[t, :count],
                )  # fmt: skip
                keys = torch.cat([keys, chosen])
            out[t], max_logits[t], lse[t] = softmax(q[t], keys, sm_scale, attn_sink)
    return SimpleNamespace(out=out, max_logits=max_logits, lse=lse)
