"""Wrong: a row without a valid slot has lse -inf."""

from __future__ import annotations

import torch
from right_attention import attend


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    out, max_logits, lse = attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    return out, max_logits, lse.masked_fill(lse.isposinf(), -torch.inf)
