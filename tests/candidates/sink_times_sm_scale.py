"""Wrong: the sink is scaled like a score."""

from __future__ import annotations

from right_attention import attend


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    if attn_sink is not None:
        attn_sink = attn_sink * sm_scale
    return attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
