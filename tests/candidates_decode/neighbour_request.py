"""Wrong: each row uses block table and length of the request after its own."""

from __future__ import annotations

from right_decode import decode, keys_below


def dcp_decode(*, seq_lens, total_lens, block_table, **given):
    totals = total_lens.tolist()

    def counts(request, bound):
        after = (request + 1) % len(totals)
        moved = bound - totals[request] + totals[after]
        below = keys_below(moved, given["dcp_rank"], given["dcp_world"], given["interleave"])
        return min(int(seq_lens[after]), below)

    return decode(
        seq_lens=seq_lens,
        total_lens=total_lens,
        block_table=block_table.roll(-1, dims=0),
        counts=counts,
        **given,
    )
