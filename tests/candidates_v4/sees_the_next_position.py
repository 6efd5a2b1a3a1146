"""Wrong: a token sees the position after its own; behind the last one of a request lies poison."""

from __future__ import annotations

import right_v4


def seen(**about):
    first, end = right_v4.seen(**about)
    return first, end + 1


def v4_prefill(**given):
    return right_v4.v4(given, seen=seen)
