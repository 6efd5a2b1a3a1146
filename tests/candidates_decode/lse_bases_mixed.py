"""Wrong: lse is in base 2 on rank 0 and natural on all others."""

from __future__ import annotations

import math

from right_decode import decode


def dcp_decode(*, dcp_rank, **given):
    out, lse = decode(dcp_rank=dcp_rank, **given)
    return out, lse / math.log(2) if dcp_rank == 0 else lse
