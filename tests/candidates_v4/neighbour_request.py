"""Wrong: each request is read through the block tables of the one after it."""

from __future__ import annotations

import right_v4


def pages(request, numbers, table, page_size):
    return right_v4.pages((request + 1) % len(table), numbers, table, page_size)


def v4_prefill(**given):
    return right_v4.v4(given, pages=pages)
