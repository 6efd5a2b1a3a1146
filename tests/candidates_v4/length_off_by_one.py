"""Wrong: each list is said to be one shorter than it is."""

from __future__ import annotations

from right_v4 import v4


def v4_prefill(**given):
    return v4(given, length=lambda listed: listed - 1)
