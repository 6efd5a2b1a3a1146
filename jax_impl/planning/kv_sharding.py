"""Which rank of a decode-context-parallel (DCP) group holds which position, and where.

A group of W ranks shares the KV cache of each request: runs of I consecutive positions go to the
ranks in turn. A rank's positions are numbered by its local index, and since they keep their
order, "all global positions before a bound" is a prefix of each rank's keys. That is why a
kernel needs nothing but a count: rank, world and interleave end here.

Sources: "VL" is vLLM 0.33.0, vllm/v1/attention/backends/utils.py (lengths) and
vllm/v1/worker/gpu/block_table.py (pages). docs/planning-rules.md has the rules in context.

Arrays in, arrays of int64 out; a single position is an array of rank 0. Positions and lengths are
accepted up to 2^63 - 1, world, interleave, page size and page numbers up to 2^31 - 1; what these
would take past 2^63 - 1 is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from jax_impl.planning._arguments import (
    INT32_MAX,
    INT64_MAX,
    Lengths,
    integer,
    integer_array,
    lengths,
    sharding,
)

Positions = int | Integer[Any, "..."]


def owner(positions: Positions, *, dcp_world: int, interleave: int = 1) -> Int64[np.ndarray, "..."]:
    """The rank that holds each global position: (position // I) % W.

    >>> owner([0, 1, 2, 3, 4], dcp_world=2).tolist()
    [0, 1, 0, 1, 0]
    >>> owner([0, 1, 2, 3, 4], dcp_world=2, interleave=2).tolist()
    [0, 0, 1, 1, 0]

    Raises:
        ValueError: a position is negative, no integer or past int64, or the group is none.
    """
    _, world, run = sharding(0, dcp_world, interleave)
    return integer_array("positions", positions) // run % world


def local_index(
    positions: Positions, *, dcp_world: int, interleave: int = 1
) -> Int64[np.ndarray, "..."]:
    """The index of each global position among its owner's: whole rounds, and the rest of a run.

    >>> local_index([0, 1, 2, 3, 4], dcp_world=2).tolist()
    [0, 0, 1, 1, 2]
    >>> local_index([0, 1, 2, 3, 4], dcp_world=2, interleave=2).tolist()
    [0, 1, 0, 1, 2]

    Raises:
        ValueError: as `owner`.
    """
    _, world, run = sharding(0, dcp_world, interleave)
    exact = integer_array("positions", positions)
    return exact // (run * world) * run + exact % run


def global_position(
    local_indices: Positions, *, dcp_rank: int, dcp_world: int, interleave: int = 1
) -> Int64[np.ndarray, "..."]:
    """The inverse: the global position of a rank's keys.

    >>> global_position([0, 1, 2], dcp_rank=1, dcp_world=2).tolist()
    [1, 3, 5]
    >>> global_position([0, 1, 2], dcp_rank=1, dcp_world=2, interleave=2).tolist()
    [2, 3, 6]

    Raises:
        ValueError: an index is negative, no integer, or one whose position is past int64; the
            rank is outside the world, or the group is none.
    """
    rank, world, run = sharding(dcp_rank, dcp_world, interleave)
    exact = integer_array("local_indices", local_indices)
    last = int(exact.max(initial=0))  # the position grows with the index
    if (furthest := last // run * run * world + rank * run + last % run) > INT64_MAX:
        raise ValueError(
            f"local_indices: {last}, at position {furthest} with dcp_world {world}; accepted: "
            f"indices of positions up to {INT64_MAX}"
        )
    return exact // run * run * world + rank * run + exact % run


def local_seq_lens(
    total_lens: Lengths, *, dcp_rank: int, dcp_world: int, interleave: int = 1
) -> Int64[np.ndarray, " B"]:
    """How many of each request's first total_len positions a rank holds.

    Rule (VL `get_dcp_local_seq_lens`): I for each whole round of I * W positions, and of what is
    left what falls into the rank's own run. A rank holds nothing of a request of at most
    rank * I tokens.

    >>> [local_seq_lens([0, 1, 2, 5], dcp_rank=r, dcp_world=2).tolist() for r in range(2)]
    [[0, 1, 1, 3], [0, 0, 1, 2]]
    >>> local_seq_lens([4, 5, 9], dcp_rank=1, dcp_world=2, interleave=4).tolist()
    [0, 1, 4]

    Args:
        total_lens: global lengths, [B] tokens >= 0.

    Returns:
        [B] tokens; over all ranks they add up to total_lens.

    Raises:
        ValueError: as `global_position`, for the lengths.
    """
    rank, world, run = sharding(dcp_rank, dcp_world, interleave)
    totals = np.asarray(lengths("total_lens", total_lens, most=INT64_MAX), np.int64)
    return count_before(totals, rank, world, run)


def count_before(
    bounds: Int64[np.ndarray, "..."], rank: int, world: int, run: int
) -> Int64[np.ndarray, "..."]:
    """A rank's positions below each bound; none below a bound <= 0. Checked arguments only."""
    bounds = np.maximum(bounds, 0)
    whole = bounds // (run * world) * run
    return whole + np.clip(bounds - whole * world - rank * run, 0, run)


def check_page_size(page_size: int, interleave: int = 1) -> int:
    """The page size, once it is a multiple of the interleave.

    Rule (VL config/vllm.py): a page, which holds P keys of a rank, covers P * W consecutive
    positions; with a run cut in two by a page's end that would no longer hold.

    >>> check_page_size(64, interleave=4)
    64
    >>> check_page_size(32, interleave=64)
    Traceback (most recent call last):
    ...
    ValueError: page_size: 32 with interleave 64; accepted: a multiple of the interleave

    Raises:
        ValueError: it is not.
    """
    size = integer("page_size", page_size, least=1, most=INT32_MAX)
    run = integer("interleave", interleave, least=1, most=INT32_MAX)
    if size % run:
        raise ValueError(
            f"page_size: {size} with interleave {run}; accepted: a multiple of the interleave"
        )
    return size


def cache_slots(
    positions: Positions,
    block_table_row: Lengths,
    *,
    page_size: int,
    dcp_rank: int,
    dcp_world: int,
    interleave: int = 1,
) -> Int64[np.ndarray, "..."]:
    """Where a rank keeps each global position of one request: page * P + place, or -1.

    Rule (VL block_table.py): P * W consecutive positions share a column of the block table on
    every rank, so a request's row of the table is the same on all of them.

    >>> cache_slots([0, 1, 2, 3, 4], [7, 9], page_size=2, dcp_rank=1, dcp_world=2).tolist()
    [-1, 14, -1, 15, -1]

    Args:
        positions: global positions.
        block_table_row: [max_pages] the request's page numbers.

    Raises:
        ValueError: as `global_position` and `check_page_size`, or a position that the rank
            holds lies behind the last page.
    """
    rank, world, run = sharding(dcp_rank, dcp_world, interleave)
    size = check_page_size(page_size, run)
    exact = integer_array("positions", positions)
    pages = np.asarray(lengths("block_table_row", block_table_row, most=INT32_MAX), np.int64)
    mine = owner(exact, dcp_world=world, interleave=run) == rank
    local = local_index(exact, dcp_world=world, interleave=run)
    column = np.where(mine, local // size, 0)
    if (furthest := column[mine].max(initial=-1)) >= len(pages):
        raise ValueError(
            f"block_table_row: {len(pages)} pages; accepted: at least {furthest + 1}, "
            f"for position {exact[mine].max()}"
        )
    if not len(pages):
        return np.full(exact.shape, -1, np.int64)
    return np.where(mine, pages[column] * size + local % size, -1)
