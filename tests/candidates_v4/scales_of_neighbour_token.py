"""Wrong: a token is multiplied by the scales of the one after it."""

from __future__ import annotations

import right_v4


def places(page, offset, page_size):
    codes, rope, scales = right_v4.places(page, offset, page_size)
    return codes, rope, scales + 8


def v4_prefill(**given):
    return right_v4.v4(given, places=places)
