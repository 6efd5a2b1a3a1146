"""Wrong: pages are looked for every 584 bytes a token, without padding."""

from __future__ import annotations

from right_v4 import v4


def places(page, offset, page_size):
    start = page * page_size * 584
    codes = start + offset * 576
    return codes, codes + 448, start + page_size * 576 + offset * 8


def v4_prefill(**given):
    return v4(given, places=places)
