"""Wrong: max_logits is taken before the product with sm_scale."""

from __future__ import annotations

import torch
from right_attention import attend, valid_slots


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    out, _, lse = attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    max_logits = torch.full_like(lse, -torch.inf)
    for t, valid in enumerate(valid_slots(indices, len(kv), topk_length)):
        if valid.any():
            max_logits[t] = (q[t].float() @ kv[indices[t][valid].long()].float().T).amax(-1)
    return out, max_logits, lse
