"""Right, and unlike every implementation here: keys in ranges of 48 from the last to the first, the
ranges' results rounded to bfloat16 and merged by lses in base 2.
"""

from __future__ import annotations

import math

import torch
from right_decode import keys_below, keys_of, rows_of

RANGE = 48


def dcp_decode(
    q, kv_cache, block_table, seq_lens, query_start_loc, sm_scale, total_lens, dcp_rank,
    dcp_world, interleave, causal, kv_scale, q_scale=None,
):  # fmt: skip
    T, H, _ = q.shape
    scale = 1.0 if kv_scale is None else kv_scale
    query_scale = 1.0 if q_scale is None else q_scale
    out = torch.zeros(T, H, 512, dtype=torch.bfloat16, device=q.device)
    lse = torch.full((T, H), -torch.inf, device=q.device)
    for t, request, bound in rows_of(query_start_loc, total_lens, causal):
        below = keys_below(bound, dcp_rank, dcp_world, interleave)
        count = min(int(seq_lens[request]), below)
        if count == 0:
            continue
        keys = keys_of(kv_cache, block_table, request, count)
        scores = (q[t].float() @ keys.T) * (sm_scale * query_scale * scale * math.log2(math.e))
        outs, lses = [], []
        for start in reversed(range(0, count, RANGE)):
            here = scores[:, start : start + RANGE]
            largest = here.amax(-1, keepdim=True)
            weights = torch.exp2(here - largest)
            total = weights.sum(-1, keepdim=True)
            summed = weights.bfloat16().float() @ keys[start : start + RANGE, :512]
            outs.append((summed * scale / total).bfloat16().float())
            lses.append((largest + total.log2())[:, 0])
        merged = torch.logsumexp(torch.stack(lses) * math.log(2), 0)
        weights = torch.exp(torch.stack(lses) * math.log(2) - merged)
        out[t] = (weights[..., None] * torch.stack(outs)).sum(0).bfloat16()
        lse[t] = merged
    return out, lse
