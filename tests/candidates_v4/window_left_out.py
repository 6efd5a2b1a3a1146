"""Wrong: no position of the window is attended to."""

from __future__ import annotations

from right_v4 import v4


def rows(b, listed, positions, oldest, M, N, **_):
    return M * b + listed


def v4_prefill(**given):
    return v4(given, rows=rows)
