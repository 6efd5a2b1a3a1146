"""Wrong: the base of a request is added twice."""

from __future__ import annotations

import right_v4


def rows(b, *keys, **about):
    return right_v4.rows(2 * b, *keys, **about)


def v4_prefill(**given):
    return right_v4.v4(given, rows=rows)
