"""Wrong: head h's results stand at head h + 1."""

from __future__ import annotations

from right_attention import attend


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    results = attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    return tuple(tensor.roll(1, dims=1) for tensor in results)
