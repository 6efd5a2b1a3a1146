"""DeepSeek-V4's sparse prefill as a candidate of one's own would write it: plain torch, one chunk
of requests after another, one token at a time.

Each wrong candidate beside this file calls it, with one function changed.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from torch_ref.planning import plan_prefill_chunks


def places(page, offset, page_size):
    """Bytes of a V4 cache, from its first one, at which a token's codes, rope and scales begin."""
    start = page * (-(-page_size * 584 // 576) * 576)
    codes = start + offset * 576
    return codes, codes + 448, start + page_size * 576 + offset * 8


def factors(scales):
    """What the 448 codes of each token are multiplied by; scales uint8 [n, 7]."""
    return torch.exp2(scales.double() - 127).repeat_interleave(64, dim=1)


def pages(request, numbers, table, page_size):
    """The page of each token of a request, and where on it the token lies."""
    return table[request, numbers // page_size].long(), numbers % page_size


def read(cache, page_size, page, offset, places=places, factors=factors):
    """Tokens in bfloat16 [n, 512]."""
    if cache.dtype == torch.bfloat16:
        return cache[page, offset]
    flat = torch.cat([cache.flatten(), cache.new_full((1024,), 0xFF)])
    codes, rope, scales = (
        flat[first[:, None] + torch.arange(size)]
        for first, size in zip(places(page, offset, page_size), (448, 128, 7), strict=True)
    )
    values = codes.view(torch.float8_e4m3fn).double() * factors(scales)
    return torch.cat([values.bfloat16(), rope.view(torch.bfloat16)], dim=1)


def seen(position, left, right, window, **_):
    """The positions [first, end) that a token sees uncompressed."""
    return max(position - max(window - 1, left), 0), position + right + 1


def entries(position, ratio, topk, **_):
    """How many entries of its list a token takes."""
    return min((position + 1) // ratio, topk)


def rows(b, listed, positions, oldest, M, N, **_):
    """The workspace rows of a token of the chunk's request b: its entries, then its positions."""
    return torch.cat([M * b + listed, M * b + N + positions - oldest])


def reach(t, request, position, image_spans):
    """How many positions before and behind itself a token's image has."""
    left = right = 0
    for first, last in image_spans[request] if image_spans else ():
        if first <= position <= last:
            left, right = position - first, last - position
    return left, right


def softmax(q, keys, scale, sink):
    """out [H, 512] bfloat16, max_logits and lse [H] of one token and its keys [n, 512]."""
    if len(keys) == 0:
        empty = torch.full((len(q),), torch.inf)
        return torch.zeros(len(q), 512, dtype=torch.bfloat16), -empty, empty
    logits = (q.float() @ keys.float().T) * scale
    largest = logits.amax(-1)
    weights = torch.exp(logits - largest[:, None])
    total = weights.sum(-1)
    summed = weights.bfloat16().float() @ keys.float()
    below = total if sink is None else total + torch.exp(sink - largest)
    return (summed / below[:, None]).bfloat16(), largest, largest + total.log()


def attend(q, workspace, indices, length, scale, sink):
    """One token over the slots of its list that name a row."""
    listed = indices[:length].long()
    kept = listed[(listed >= 0) & (listed < len(workspace))]
    return softmax(q, workspace[kept], scale, sink)


def gather_end(length, queries):
    """Where the positions that are gathered end."""
    return length


def fixed_plan(queries, bounds, given):
    return plan_prefill_chunks(
        bounds,
        queries,
        compress_ratio=given.compress_ratio,
        window=given.window,
        max_model_len=given.max_model_len,
        max_num_batched_tokens=given.max_num_batched_tokens,
        chunk_size=given.chunk_size,
        has_compressed=given.compressed_cache is not None,
    )


def v4(
    given, *, plan=fixed_plan, pages=pages, places=places, factors=factors, seen=seen,
    entries=entries, rows=rows, attend=attend, length=int, gather_end=gather_end,
):  # fmt: skip
    """out [T, H, 512] bfloat16, max_logits and lse [T, H] float32, plan, and stages.

    given: the suite's arguments. The others are what a wrong candidate changes; length: from what a
    token's list has to what is said of it.
    """
    given = SimpleNamespace(**given)
    starts = (given.query_start_loc - given.query_start_loc[0]).tolist()
    lens, n = given.seq_lens.tolist(), len(given.seq_lens)
    queries = [starts[i + 1] - starts[i] for i in range(n)]
    bounds = lens if given.seq_lens_bound is None else given.seq_lens_bound.tolist()
    T, H, _ = given.q.shape
    topk = 0 if given.topk_indices is None else given.topk_indices.shape[1]
    # One slot more than a right list can take: some wrong ones do.
    width = math.ceil((topk + given.window + given.max_image_tokens + 1) / 128) * 128
    out = torch.zeros(T, H, 512, dtype=torch.bfloat16)
    max_logits, lse = torch.full((T, H), -torch.inf), torch.full((T, H), torch.inf)
    stages = []
    chunks = plan(queries, bounds, given)
    for chunk in chunks:
        count, M, N = chunk.end - chunk.start, chunk.workspace_rows, chunk.compressed_rows
        workspace = torch.full((count, M, 512), torch.nan, dtype=torch.bfloat16)
        tokens = chunk.query_end - chunk.query_start
        indices = torch.full((tokens, width), -1, dtype=torch.int32)
        lengths = torch.zeros(tokens, dtype=torch.int32)
        for b in range(count):
            request = chunk.start + b
            length_of, before = lens[request], lens[request] - queries[request]
            if not queries[request]:
                continue
            gathered = queries[request] + min(before, given.window - 1)
            oldest = length_of - gathered
            for cache, table, page_size, first, numbers in (
                (given.compressed_cache, given.compressed_block_table, given.compressed_page, 0,
                 torch.arange(length_of // given.compress_ratio)),
                (given.swa_cache, given.swa_block_table, given.swa_page, N,
                 torch.arange(-gathered, 0) + gather_end(length_of, queries[request])),
            ):  # fmt: skip
                if cache is not None:
                    page, offset = pages(request, numbers, table, page_size)
                    page = page.clamp(0, len(cache) - 1)
                    held = read(cache, page_size, page, offset, places, factors)
                    workspace[b, first : first + len(numbers)] = held
            for t in range(starts[request], starts[request + 1]):
                position = before + t - starts[request]
                left, right = reach(t, request, position, given.image_spans)
                about = {
                    "position": position, "left": left, "right": right, "window": given.window,
                    "ratio": given.compress_ratio, "topk": topk, "queries": queries[request],
                }  # fmt: skip
                first, end = seen(**about)
                listed = torch.zeros(0, dtype=torch.int32)
                if topk:
                    listed = given.topk_indices[t, : entries(**about)]
                found = rows(
                    b, listed, torch.arange(first, max(end, first)), oldest, M, N, count=count
                )
                at = t - chunk.query_start
                indices[at, : len(found)] = found
                lengths[at] = length(len(found))
        flat = workspace.flatten(0, 1)
        for at in range(tokens):
            t = chunk.query_start + at
            out[t], max_logits[t], lse[t] = attend(
                given.q[t], flat, indices[at], int(lengths[at]), given.sm_scale, given.attn_sink
            )
        stages.append(SimpleNamespace(workspace=workspace, indices=indices, lengths=lengths))
    return SimpleNamespace(
        out=out, max_logits=max_logits, lse=lse, plan=tuple(chunks), stages=tuple(stages)
    )


def v4_prefill(**given):
    return v4(given)
