"""Wrong: padded rows are clamped to the last request and attend to its keys."""

from __future__ import annotations

from right_decode import decode, rows_of


def dcp_decode(*, q, query_start_loc, total_lens, causal, **given):
    rows = list(rows_of(query_start_loc, total_lens, causal))
    last = len(total_lens) - 1
    rows += [(t, last, int(total_lens[last])) for t in range(len(rows), len(q))]
    q = q.nan_to_num(0.0)
    return decode(
        q=q, query_start_loc=query_start_loc, total_lens=total_lens, causal=causal, rows=rows,
        **given,
    )  # fmt: skip
