"""Right, and unlike every implementation here: a request without query tokens ends a chunk, lists
begin with the newest position and end with the entries, and keys are added up from the last on.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from right_v4 import fixed_plan, softmax, v4


def plan(queries, bounds, given):
    """The fixed plan with its chunks cut wherever a request has no query token."""
    chunks = []
    for chunk in fixed_plan(queries, bounds, given):
        own = [r for r in range(chunk.start, chunk.end) if queries[r]]
        runs = [[own[0]]]
        for request in own[1:]:
            if request == runs[-1][-1] + 1:
                runs[-1].append(request)
            else:
                runs.append([request])
        token = chunk.query_start
        for run in runs:
            end = token + sum(queries[r] for r in run)
            needs = [bounds[r] // given.compress_ratio for r in run]
            gathered = [queries[r] + min(bounds[r] - queries[r], given.window - 1) for r in run]
            N = max(needs) if given.compressed_cache is not None else 0
            cut = replace(
                chunk, start=run[0], end=run[-1] + 1, query_start=token, query_end=end,
                compressed_rows=N, workspace_rows=N + max(gathered),
            )  # fmt: skip
            chunks.append(cut)
            token = end
    return chunks


def rows(b, listed, positions, oldest, M, N, **_):
    return torch.cat([(M * b + N + positions - oldest).flip(0), M * b + listed])


def attend(q, workspace, indices, length, scale, sink):
    return softmax(q, workspace[indices[:length].flip(0).long()], scale, sink)


def v4_prefill(**given):
    return v4(given, plan=plan, rows=rows, attend=attend)
