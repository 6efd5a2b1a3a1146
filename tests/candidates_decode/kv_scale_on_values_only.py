"""Wrong: kv_scale is applied to values and not to scores."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(**given):
    return decode(score_scale=1.0, **given)
