"""Wrong: a request without query tokens is a chunk of its own, as vLLM 0.33.0 plans it."""

from __future__ import annotations

from dataclasses import replace

from right_v4 import fixed_plan, v4


def plan(queries, bounds, given):
    chunks = []
    for chunk in fixed_plan(queries, bounds, given):
        start, token = chunk.start, chunk.query_start
        for request in range(chunk.start, chunk.end):
            if queries[request] == 0:
                chunks.append(
                    replace(
                        chunk, start=request, end=request + 1, query_start=token, query_end=token
                    )
                )
                start = request + 1
            elif request + 1 == chunk.end or queries[request + 1] == 0:
                end = token + sum(queries[start : request + 1])
                chunks.append(
                    replace(chunk, start=start, end=request + 1, query_start=token, query_end=end)
                )
                token = end
    return chunks


def v4_prefill(**given):
    return v4(given, plan=plan)
