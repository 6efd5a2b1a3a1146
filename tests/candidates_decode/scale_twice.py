"""Wrong: scores are multiplied by sm_scale twice."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(*, sm_scale, **given):
    return decode(sm_scale=sm_scale * sm_scale, **given)
