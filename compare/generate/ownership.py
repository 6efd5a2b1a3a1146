"""Which rank holds which key of a request, as the inputs of decode are dealt out.

Positions go to the W ranks in turn, in runs of I (the interleave); a rank keeps its positions in
order. Source: vLLM 0.33.0, v1/attention/backends/utils.py and v1/worker/gpu/block_table.py.
"""

from __future__ import annotations

import numpy as np


def owned_positions(total: int, rank: int, world: int, interleave: int) -> np.ndarray:
    """int64: the global positions below `total` that a rank holds; its local key k is the k-th."""
    positions = np.arange(total, dtype=np.int64)
    return positions[positions // interleave % world == rank]


def local_length(total: int, rank: int, world: int, interleave: int) -> int:
    """How many positions below `total` a rank holds; none where that is negative.

    A stripe of world * interleave positions holds `interleave` of each rank.
    """
    stripes, rest = divmod(max(total, 0), interleave * world)
    return stripes * interleave + min(max(rest - rank * interleave, 0), interleave)


def local_positions(positions: np.ndarray, rank: int, world: int, interleave: int) -> np.ndarray:
    """int64: the place of each global position among the keys of a rank; -1 where another rank
    holds it, or where there is none (a negative one).
    """
    run, offset = np.divmod(positions.astype(np.int64), interleave)
    held = (positions >= 0) & (run % world == rank)
    return np.where(held, run // world * interleave + offset, -1)
