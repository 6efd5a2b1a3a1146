"""Sparse prefill as a candidate of one's own would write it: plain torch, one token at a time.

Each wrong candidate beside this file calls it, with one line changed.
"""

from __future__ import annotations

import torch


def valid_slots(indices, num_kv, topk_length):
    """bool [T, K]: the slots that name a key."""
    valid = (indices >= 0) & (indices < num_kv)
    if topk_length is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < topk_length[:, None]
    return valid


def attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    """(out [T, H, d_v] bfloat16, max_logits [T, H], lse [T, H] float32)."""
    valid = valid_slots(indices, len(kv), topk_length)
    return attend_to(q, kv, kv[:, :d_v], indices, valid, sm_scale, attn_sink)


def attend_to(q, keys, values, indices, valid, sm_scale, attn_sink):
    """The same with the slots already judged, and keys [S, D] apart from values [S, d_v]."""
    T, H, _ = q.shape
    out = torch.zeros(T, H, values.shape[1], dtype=torch.bfloat16, device=q.device)
    max_logits = torch.full((T, H), -torch.inf, device=q.device)
    lse = torch.full((T, H), torch.inf, device=q.device)
    for t in range(T):
        rows = indices[t][valid[t]].long()
        if len(rows) == 0:
            continue
        logits = (q[t].float() @ keys[rows].float().T) * sm_scale
        max_logits[t] = logits.amax(-1)
        weights = torch.exp(logits - max_logits[t][:, None])
        total = weights.sum(-1)
        lse[t] = max_logits[t] + total.log()
        if attn_sink is not None:
            total = total + torch.exp(attn_sink - max_logits[t])
        weighted = weights.bfloat16().float() @ values[rows].float()
        out[t] = (weighted / total[:, None]).bfloat16()
    return out, max_logits, lse
