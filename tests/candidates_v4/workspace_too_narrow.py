"""Wrong: a request without query tokens has no say in N and M, and its keys spill over."""

from __future__ import annotations

from dataclasses import replace

from right_v4 import fixed_plan, v4


def plan(queries, bounds, given):
    def needs(request):
        before = min(bounds[request] - queries[request], given.window - 1)
        return bounds[request] // given.compress_ratio, queries[request] + before

    chunks = []
    for chunk in fixed_plan(queries, bounds, given):
        kept = [needs(r) for r in range(chunk.start, chunk.end) if queries[r]]
        entries = max(n for n, _ in kept)
        rows = entries + max(g for _, g in kept)
        chunks.append(replace(chunk, compressed_rows=entries, workspace_rows=rows))
    return chunks


def v4_prefill(**given):
    return v4(given, plan=plan)
