"""Blocks of rows on several threads: NumPy lets go of the interpreter while it computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

_AHEAD = 2
"""Items in flight per thread: enough to keep all busy, few enough to bound their memory."""


def in_order[Item, Found](work: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
    """work(item) of each item, in the order of the items, on as many threads as there are
    processors. Items are taken one after the other by the caller's thread, few ahead of the
    results. What work raises goes through.
    """
    threads = os.cpu_count() or 1
    pending: deque[Future[Found]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="judge") as pool:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > _AHEAD * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
