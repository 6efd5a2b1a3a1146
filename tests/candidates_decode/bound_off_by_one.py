"""Wrong: a token sees the one after it, where there is one."""

from __future__ import annotations

from right_decode import decode, rows_of


def dcp_decode(*, query_start_loc, total_lens, causal, **given):
    right = rows_of(query_start_loc, total_lens, causal)
    rows = [(t, request, bound + 1) for t, request, bound in right]
    return decode(
        query_start_loc=query_start_loc, total_lens=total_lens, causal=causal, rows=rows, **given
    )
