"""Ownership of positions: checked position by position, and by what must hold for all of them."""

from __future__ import annotations

import doctest
import importlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_impl.planning import (
    cache_slots,
    check_page_size,
    global_position,
    local_index,
    local_seq_lens,
    owner,
)

INT64_MAX = 2**63 - 1
GROUPS = [(1, 1), (1, 64), (2, 1), (2, 4), (3, 1), (4, 64), (5, 4), (8, 1), (8, 4)]


def test_the_examples_of_the_rules_are_right():
    module = importlib.import_module("jax_impl.planning.kv_sharding")
    result = doctest.testmod(module)
    assert result.attempted > 10 and not result.failed


@pytest.mark.parametrize(("world", "run"), GROUPS)
def test_each_position_has_one_owner_and_one_place(world, run):
    positions = np.arange(1000)
    ranks = owner(positions, dcp_world=world, interleave=run)
    places = local_index(positions, dcp_world=world, interleave=run)
    assert len(set(zip(ranks.tolist(), places.tolist(), strict=True))) == 1000
    dealt = [0] * world  # one run to each rank in turn, position by position
    for position in range(1000):
        rank = position // run % world
        assert (ranks[position], places[position]) == (rank, dealt[rank])
        dealt[rank] += 1
    for rank in range(world):
        mine = positions[ranks == rank]
        back = global_position(np.arange(len(mine)), dcp_rank=rank, dcp_world=world, interleave=run)
        np.testing.assert_array_equal(back, mine)


@pytest.mark.parametrize(("world", "run"), GROUPS)
def test_local_lengths_count_the_positions_that_a_rank_owns(world, run):
    lens = sorted({0, 1, world - 1, world, world + 1, run, run * world, run * world + 1, 777})
    ranks = owner(np.arange(1000), dcp_world=world, interleave=run)
    for rank in range(world):
        held = local_seq_lens(lens, dcp_rank=rank, dcp_world=world, interleave=run)
        assert held.tolist() == [int((ranks[:length] == rank).sum()) for length in lens]


@given(st.integers(0, 2**40), st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**40))
def test_lengths_of_any_size_add_up_and_are_exact(length, world, run, position):
    held = [
        int(local_seq_lens([length], dcp_rank=r, dcp_world=world, interleave=run)[0])
        for r in range(world)
    ]
    assert sum(held) == length
    assert all((count == 0) == (length <= rank * run) for rank, count in enumerate(held))
    rank = int(owner(position, dcp_world=world, interleave=run))
    place = local_index(position, dcp_world=world, interleave=run)
    group = {"dcp_rank": rank, "dcp_world": world, "interleave": run}
    assert global_position(place, **group) == position
    before, after = local_seq_lens([position, position + 1], **group)
    assert (before, after) == (place, place + 1)


@pytest.mark.parametrize(("world", "run"), [(1, 1), (2, 1), (4, 8), (3, 32)])
def test_slots_of_all_ranks_are_those_of_the_pages_that_share_a_column(world, run):
    """P * W consecutive positions share a column of the block table."""
    size, table = 32, [5, 0, 9]
    positions = np.arange(3 * size * world)
    found = np.full(len(positions), -1)
    for rank in range(world):
        slots = cache_slots(
            positions, table, page_size=size, dcp_rank=rank, dcp_world=world, interleave=run
        )
        assert ((slots >= 0) == (owner(positions, dcp_world=world, interleave=run) == rank)).all()
        assert len(set(slots[slots >= 0])) == 3 * size  # each slot of each page, once
        found = np.where(slots >= 0, slots, found)
    np.testing.assert_array_equal(found // size, np.repeat(table, size * world))


def test_the_largest_positions_and_groups_are_served_exactly():
    """Against Python's integers, which neither wrap nor round."""
    positions = [INT64_MAX, INT64_MAX - 1, 2**62]
    for world, run in [(1, 1), (8, 4), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)]:
        stripe = world * run
        ranks = [p // run % world for p in positions]
        places = [p // stripe * run + p % run for p in positions]
        assert owner(positions, dcp_world=world, interleave=run).tolist() == ranks
        assert local_index(positions, dcp_world=world, interleave=run).tolist() == places
        for position, rank, place in zip(positions, ranks, places, strict=True):
            group = {"dcp_rank": rank, "dcp_world": world, "interleave": run}
            assert int(global_position(place, **group)) == position
            rest = position % stripe - rank * run
            held = position // stripe * run + min(max(rest, 0), run)
            assert local_seq_lens([position], **group).tolist() == [held]


BAD = [
    (owner, ([-1],), {"dcp_world": 2}, f"positions: -1; accepted: integers from 0 to {INT64_MAX}"),
    (owner, ([0.5],), {"dcp_world": 2}, "positions: 0.5; accepted: integers from 0"),
    (owner, (np.zeros(1),), {"dcp_world": 2}, "positions: dtype float64; accepted: integers"),
    (owner, ([True],), {"dcp_world": 2}, "positions: True; accepted: integers from 0"),
    (owner, ([-1, 2**63],), {"dcp_world": 2}, "positions: -1; accepted: integers from 0"),
    (owner, ([0, 2**64],), {"dcp_world": 2}, f"positions: {2**64}; accepted: integers from 0"),
    (
        owner, (np.array([2**63 + 5], np.uint64),), {"dcp_world": 2},
        f"positions: {2**63 + 5}; accepted: integers from 0 to {INT64_MAX}",
    ),
    (owner, ([0],), {"dcp_world": 2**31}, f"dcp_world: {2**31}; accepted: an integer from 1 to"),
    (
        global_position, ([3, 2**62],), {"dcp_rank": 1, "dcp_world": 8},
        f"local_indices: {2**62}, at position 36893488147419103233 with dcp_world 8; accepted: "
        f"indices of positions up to {INT64_MAX}",
    ),
    (
        local_seq_lens, ([5, 2**63],), {"dcp_rank": 0, "dcp_world": 2},
        f"total_lens[1]: {2**63}; accepted: integers from 0 to {INT64_MAX}",
    ),
    (
        local_seq_lens, ([5],), {"dcp_rank": 0, "dcp_world": 4, "interleave": 2**62},
        f"interleave: {2**62}; accepted: an integer from 1 to 2147483647",
    ),
    (
        cache_slots, ([0], [2**31]), {"page_size": 32, "dcp_rank": 0, "dcp_world": 2},
        f"block_table_row[0]: {2**31}; accepted: integers from 0 to 2147483647",
    ),
    (check_page_size, (2**64,), {}, f"page_size: {2**64}; accepted: an integer from 1 to"),
    (owner, ([0],), {"dcp_world": 0}, "dcp_world: 0; accepted: an integer >= 1"),
    (owner, ([0],), {"dcp_world": 2, "interleave": 0}, "interleave: 0; accepted"),
    (global_position, ([0],), {"dcp_rank": 2, "dcp_world": 2}, "dcp_rank: 2 in a world of 2"),
    (local_seq_lens, ([-1],), {"dcp_rank": 0, "dcp_world": 2}, "total_lens[0]: -1; accepted"),
    (check_page_size, (32, 64), {}, "page_size: 32 with interleave 64; accepted: a multiple"),
    (check_page_size, (0,), {}, "page_size: 0; accepted: an integer >= 1"),
    (
        cache_slots, ([64], [3]), {"page_size": 32, "dcp_rank": 0, "dcp_world": 2},
        "block_table_row: 1 pages; accepted: at least 2, for position 64",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "options", "message"), BAD)
def test_what_is_no_position_or_no_group_is_refused(function, arguments, options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        function(*arguments, **options)
