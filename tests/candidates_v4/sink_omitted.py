"""Wrong: the sink is left out."""

from __future__ import annotations

from right_v4 import v4


def v4_prefill(**given):
    return v4({**given, "attn_sink": None})
