"""Wrong: the window's gather ends with the prefix, before this step's tokens."""

from __future__ import annotations

from right_v4 import v4


def gather_end(length, queries):
    return length - queries


def v4_prefill(**given):
    return v4(given, gather_end=gather_end)
