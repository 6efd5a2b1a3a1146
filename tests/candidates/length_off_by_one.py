"""Wrong: slot j takes part if j <= topk_length."""

from __future__ import annotations

from right_attention import attend


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    if topk_length is not None:
        topk_length = topk_length + 1
    return attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
