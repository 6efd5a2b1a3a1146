"""DCP decode as a candidate of one's own would write it: plain torch, one token at a time.

Each wrong candidate beside this file calls it, with one line changed.
"""

from __future__ import annotations

import torch


def keys_below(bound, rank, world, interleave):
    """How many global positions below `bound` a rank holds."""
    whole, rest = divmod(max(bound, 0), world * interleave)
    return whole * interleave + min(max(rest - rank * interleave, 0), interleave)


def rows_of(query_start_loc, total_lens, causal):
    """(token, request, bound) of each real row."""
    starts, totals = query_start_loc.tolist(), total_lens.tolist()
    for b, total in enumerate(totals):
        for t in range(starts[b], starts[b + 1]):
            yield t, b, total - (starts[b + 1] - 1 - t if causal else 0)


def keys_of(kv_cache, block_table, request, count):
    """The first `count` keys of a request [count, 576], as they are stored, in float32."""
    page = kv_cache.shape[1]
    pages = block_table[request, : -(-count // page)].long()
    return kv_cache[pages].flatten(0, 1)[:count].float()


def softmax_of(q, keys, values, scale, value_scale):
    """out [H, 512] bfloat16 and lse [H] float32 of one token."""
    logits = (q.float() @ keys.T) * scale
    largest = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - largest)
    total = weights.sum(-1, keepdim=True)
    summed = weights.bfloat16().float() @ values
    return (summed * value_scale / total).bfloat16(), (largest + total.log())[:, 0]


def decode(
    *, q, kv_cache, block_table, seq_lens, query_start_loc, sm_scale, total_lens, dcp_rank,
    dcp_world, interleave, causal, kv_scale, q_scale=None, rows=None, counts=None, values=None,
    score_scale=None, value_scale=None, empty_lse=-torch.inf,
):  # fmt: skip
    """(out [T, H, 512] bfloat16, lse [T, H] float32 natural-log).

    rows: instead of the right (token, request, bound); counts: instead of the right
    (request, bound) -> number of keys; values: instead of the right keys -> [n, 512]; score_scale,
    value_scale: instead of kv_scale for scores and for values.
    """
    scale = 1.0 if kv_scale is None else kv_scale
    score_scale = scale if score_scale is None else score_scale
    value_scale = scale if value_scale is None else value_scale
    score_scale = score_scale if q_scale is None else score_scale * q_scale
    T, H, _ = q.shape
    out = torch.zeros(T, H, 512, dtype=torch.bfloat16, device=q.device)
    lse = torch.full((T, H), -torch.inf, device=q.device)
    for t, request, bound in rows or rows_of(query_start_loc, total_lens, causal):
        if counts is None:
            held = int(seq_lens[request])
            count = min(held, keys_below(bound, dcp_rank, dcp_world, interleave))
        else:
            count = counts(request, bound)
        if count == 0:
            lse[t] = empty_lse
            continue
        keys = keys_of(kv_cache, block_table, request, count)
        v = keys[:, :512] if values is None else values(keys)
        out[t], lse[t] = softmax_of(q[t], keys, v, sm_scale * score_scale, value_scale)
    return out, lse


def dcp_decode(
    q, kv_cache, block_table, seq_lens, query_start_loc, sm_scale, total_lens, dcp_rank,
    dcp_world, interleave, causal, kv_scale, q_scale=None,
):  # fmt: skip
    return decode(
        q=q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens,
        query_start_loc=query_start_loc, sm_scale=sm_scale, total_lens=total_lens,
        dcp_rank=dcp_rank, dcp_world=dcp_world, interleave=interleave, causal=causal,
        kv_scale=kv_scale, q_scale=q_scale,
    )  # fmt: skip
