"""Wrong: the local length is known first, and the tokens after are taken off it."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(*, seq_lens, total_lens, **given):
    local, totals = seq_lens.tolist(), total_lens.tolist()

    def counts(request, bound):
        return max(local[request] - (totals[request] - bound), 0)

    return decode(seq_lens=seq_lens, total_lens=total_lens, counts=counts, **given)
