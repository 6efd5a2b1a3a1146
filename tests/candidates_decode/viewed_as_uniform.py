"""Wrong: the batch is viewed as [requests, rows / requests], whatever lengths the requests have."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(*, q, total_lens, **given):
    totals = total_lens.tolist()
    each, rest = divmod(len(q), len(totals))
    assert rest == 0
    rows = [(t, t // each, totals[t // each] - (each - 1 - t % each)) for t in range(len(q))]
    real = int(given["query_start_loc"][-1])
    return decode(q=q, total_lens=total_lens, rows=rows[:real], **given)
