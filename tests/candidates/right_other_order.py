"""Right, and unlike every implementation here: blocks of 48 keys from the last to the first, holes
walked along, and an online softmax that rescales only when the maximum has grown by 2^8.
"""

from __future__ import annotations

import math

import torch
from right_attention import valid_slots

BLOCK = 48
LAZY = 8.0  # in base 2


def sparse_prefill(*, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    T, H, _ = q.shape
    valid = valid_slots(indices, len(kv), topk_length)
    out = torch.zeros(T, H, d_v, dtype=torch.bfloat16, device=q.device)
    max_logits = torch.full((T, H), -torch.inf, device=q.device)
    lse = torch.full((T, H), torch.inf, device=q.device)
    for t in range(T):
        if not valid[t].any():
            continue
        reference = torch.full((H,), -torch.inf, device=q.device)
        largest, total = reference.clone(), torch.zeros(H, device=q.device)
        summed = torch.zeros(H, d_v, device=q.device)
        for start in reversed(range(0, indices.shape[1], BLOCK)):
            here = valid[t, start : start + BLOCK]
            if not here.any():
                continue
            rows = indices[t, start : start + BLOCK].where(here, 0).long()
            keys = kv[rows].float().where(here[:, None], 0.0)
            scores = (q[t].float() @ keys.T) * (sm_scale * math.log2(math.e))
            scores = scores.masked_fill(~here, -torch.inf)
            largest = torch.fmax(largest, scores.nan_to_num(-torch.inf).amax(-1))
            moved = torch.where(largest - reference > LAZY, largest, reference)
            shrink = torch.exp2(reference - moved)
            reference = moved
            weights = torch.exp2(scores - reference[:, None])
            total = total * shrink + weights.sum(-1)
            summed = summed * shrink[:, None] + weights.bfloat16().float() @ keys[:, :d_v]
        max_logits[t] = largest * math.log(2)
        lse[t] = (reference + total.log2()) * math.log(2)
        if attn_sink is not None:
            total = total + torch.exp2(attn_sink * math.log2(math.e) - reference)
        out[t] = (summed * total.reciprocal()[:, None]).bfloat16()
    return out, max_logits, lse
