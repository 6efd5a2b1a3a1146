"""Blocks of rows on several threads: torch and NumPy let go of the interpreter as they compute."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

_AHEAD = 2
"""Items in flight per thread: enough to keep all busy, few enough to bound their memory."""

_CUDA_THREADS = 4
"""Enough to read host memory while a GPU measures."""


def in_order[Item, Found](
    work: Callable[[Item], Found], items: Iterable[Item], device: str | None = None
) -> Iterator[Found]:
    """work(item) of each item, in the order of the items, on as many threads as there are
    processors (on four, where a GPU does the work). Items are taken one after the other by the
    caller's thread, few ahead of the results. What work raises goes through.
    """
    on_cpu = torch.device(device or "cpu").type == "cpu"
    processors = os.cpu_count() or 1
    threads = processors if on_cpu else min(processors, _CUDA_THREADS)
    pending: deque[Future[Found]] = deque()
    mine = torch.get_num_threads()
    # Each of these threads is one of torch's: it would start as many again for every operation.
    alone = partial(torch.set_num_threads, 1) if on_cpu else None
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="judge", initializer=alone) as pool:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > (_AHEAD * threads if on_cpu else threads):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    finally:
        # What the last call of set_num_threads said is what threads started later begin with.
        torch.set_num_threads(mine)
