"""Wrong: the whole row of topk_indices is used, -1 and all."""

from __future__ import annotations

from right_v4 import v4


def entries(topk, **_):
    return topk


def v4_prefill(**given):
    return v4(given, entries=entries)
