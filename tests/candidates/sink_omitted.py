"""Wrong: the sink is left out."""

from __future__ import annotations

from right_attention import attend


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    return attend(q, kv, indices, sm_scale, d_v, None, topk_length)
