"""Big tensors are made in blocks of rows: bounded memory, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

BLOCK_WORDS = 1 << 18
"""Random words made at a time: 2 MB, which a processor cache holds through all steps."""


def in_blocks(fill: Callable[[int, int], None], rows: int, width: int) -> None:
    """Calls fill(start, end) over all rows of `width` words, in blocks of BLOCK_WORDS, several at
    a time where there are many.
    """
    step = max(1, BLOCK_WORDS // max(width, 1))
    starts = range(0, rows, step)
    if len(starts) <= 1:
        if rows:
            fill(0, rows)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda start: fill(start, min(start + step, rows)), starts))
