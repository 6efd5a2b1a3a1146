"""Wrong: lse counts the sink."""

from __future__ import annotations

import torch
from right_attention import attend


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    out, max_logits, lse = attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    if attn_sink is not None:
        lse = torch.logaddexp(lse, attn_sink)
    return out, max_logits, lse
