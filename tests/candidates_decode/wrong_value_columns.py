"""Wrong: V is the last 512 columns of a key."""

from __future__ import annotations

from right_decode import decode


def dcp_decode(**given):
    return decode(values=lambda keys: keys[:, 64:], **given)
