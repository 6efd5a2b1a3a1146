"""Wrong: the mask takes neighbouring positions for those of different ranks."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(*, interleave, **given):
    return decode(interleave=1, **given)
