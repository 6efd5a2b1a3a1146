"""Wrong: lse in base 2."""

from __future__ import annotations

import math

from right_attention import attend


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    out, max_logits, lse = attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    return out, max_logits, lse / math.log(2)
