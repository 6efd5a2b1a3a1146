"""Wrong: stored float8 values are taken as they are."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(**given):
    return decode(score_scale=1.0, value_scale=1.0, **given)
