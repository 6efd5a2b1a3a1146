"""Wrong: the mask counts the positions of the next rank."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(*, dcp_rank, dcp_world, **given):
    return decode(dcp_rank=(dcp_rank + 1) % dcp_world, dcp_world=dcp_world, **given)
