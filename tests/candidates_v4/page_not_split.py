"""Wrong: a page is read as tokens of 584 bytes side by side."""

from __future__ import annotations

from right_v4 import v4


def places(page, offset, page_size):
    codes = page * (-(-page_size * 584 // 576) * 576) + offset * 584
    return codes, codes + 448, codes + 576


def v4_prefill(**given):
    return v4(given, places=places)
