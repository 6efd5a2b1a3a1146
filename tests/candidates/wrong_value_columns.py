"""Wrong: V is the last 512 columns of kv, which at D = 576 hold the rope dimensions."""

from __future__ import annotations

from right_attention import attend_to, valid_slots


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    valid = valid_slots(indices, len(kv), topk_length)
    return attend_to(q, kv, kv[:, -d_v:], indices, valid, sm_scale, attn_sink)
