"""Wrong: an index of -1 reads the last row of kv, as a[-1] does."""

from __future__ import annotations

import torch
from right_attention import attend


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    indices = torch.where(indices == -1, len(kv) - 1, indices)
    return attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
