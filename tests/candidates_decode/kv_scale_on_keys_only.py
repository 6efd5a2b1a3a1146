"""Wrong: kv_scale is applied to scores and not to values."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(**given):
    return decode(value_scale=1.0, **given)
