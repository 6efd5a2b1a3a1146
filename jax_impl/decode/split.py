"""Dealing the keys of a batch to thread blocks: whole units where that is even enough, else cut.

A unit is a group of row tiles of one request, one tile for each thread block of a cluster; its
size is the number of key pairs (128 keys) that it walks over. Whatever walks over one unit
together needs a merge only if the unit is cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

# In key pairs: what an item costs besides its keys (loading queries, storing results), and what
# a second launch for merging costs.
ITEM_COST = 1.5
MERGE_COST = 5.0


class Piece(NamedTuple):
    """Some key pairs of a unit, for one worker (a thread block or a cluster of them)."""

    worker: int
    unit: int
    first_pair: int
    num_pairs: int


def deal(pairs: Sequence[int], workers: int) -> list[Piece]:
    """Pieces of units of so many key pairs, in ascending order of worker and of pairs.

    Whole units go to the least loaded worker, the largest first. If the slowest worker is then
    later than equal shares and a merge would be, units are cut into equal shares instead, each
    worker getting at most a share's worth of consecutive pieces.
    """
    if not pairs:
        return []
    share = max((sum(pairs) + len(pairs) * ITEM_COST) / workers, 1 + ITEM_COST)
    whole, slowest = _whole_units(pairs, workers)
    if slowest <= share + MERGE_COST:
        return whole
    return _equal_shares(pairs, workers, share)


def deal_fixed(pairs: Sequence[int], workers: int, pairs_per_piece: int) -> list[Piece]:
    """Units cut at every multiple of pairs_per_piece, whatever else is in the batch."""
    cuts = [
        (unit, first, min(pairs_per_piece, count - first))
        for unit, count in enumerate(pairs)
        for first in range(0, max(count, 1), pairs_per_piece)
    ]
    dealt, _ = _whole_units([count for *_, count in cuts], workers)
    return [Piece(piece.worker, *cuts[piece.unit]) for piece in dealt]


def _whole_units(pairs: Sequence[int], workers: int) -> tuple[list[Piece], float]:
    """Longest first onto the least loaded worker; the pieces, and the largest load."""
    loads = [(0.0, worker) for worker in range(workers)]
    owners: list[list[int]] = [[] for _ in range(workers)]
    slowest = 0.0
    for unit in sorted(range(len(pairs)), key=lambda unit: -pairs[unit]):
        load, worker = loads[0]
        load += pairs[unit] + ITEM_COST
        heapq.heapreplace(loads, (load, worker))
        owners[worker].append(unit)
        slowest = max(slowest, load)
    pieces = [
        Piece(worker, unit, 0, pairs[unit])
        for worker, units in enumerate(owners)
        for unit in sorted(units)
    ]
    return pieces, slowest


def _equal_shares(pairs: Sequence[int], workers: int, share: float) -> list[Piece]:
    """Cut units so that the largest share is about as small as it can be."""
    lowest, highest = share, share
    while (pieces := _fill(pairs, workers, highest)) is None:
        lowest, highest = highest, highest * 1.05 + 1
    while highest - lowest > 0.25:
        middle = (lowest + highest) / 2
        fitting = _fill(pairs, workers, middle)
        if fitting is None:
            lowest = middle
        else:
            highest, pieces = middle, fitting
    return pieces


def _fill(pairs: Sequence[int], workers: int, share: float) -> list[Piece] | None:
    """Fills one worker after another up to a share; None if there are too few of them."""
    pieces = []
    worker, used = 0, 0.0
    for unit, count in enumerate(pairs):
        first = 0
        while True:
            if used and used + ITEM_COST + 1 > share:
                worker, used = worker + 1, 0.0
            if worker == workers:
                return None
            taken = min(count - first, max(1, int(share - used - ITEM_COST)))
            pieces.append(Piece(worker, unit, first, taken))
            first, used = first + taken, used + taken + ITEM_COST
            if first >= count:
                break
    return pieces
