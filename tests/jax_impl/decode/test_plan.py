"""The work list: every row sees exactly its keys, once, whichever way the work is dealt."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jax_impl import DecodeCapacity, DecodePlan, plan_decode
from jax_impl.decode import split
from jax_impl.decode.kernel_sm90 import work
from jax_impl.planning import local_seq_lens


def violations(plan: DecodePlan, heads: int) -> set[str]:
    """Names of what a plan does wrong, judged from its arrays alone."""
    heads = work.rows_of_token(heads)
    found = set()
    rows, workers = plan.num_rows * heads, len(plan.first_item) - 2
    starts = plan.first_item
    if (np.diff(starts) < 0).any() or starts[0] != 0 or starts[-1] > len(plan.items):
        found.add("items")
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    extents: dict[int, int] = {}
    for number in range(starts[-1]):
        item = plan.items[number]
        walked = item[:, [work.REQUEST, work.FIRST_PAIR, work.NUM_PAIRS, work.END]]
        if (walked != walked[0]).any():
            found.add("cluster")
        if (item[0, work.NUM_PAIRS] == 0) != (number >= starts[workers]):
            found.add("empty items")
        for first, count, request, pair, pairs, end, full, partial in item.tolist():
            if not count:
                continue
            seen = plan.row_keys[np.arange(first, first + count) // heads]
            owners = plan.row_request[np.arange(first, first + count) // heads]
            if pairs and (owners != request).any():
                found.add("request")
            if seen.max() > end or seen.min() < full:
                found.add("mask")
            pieces.setdefault(first, []).append((pair, pairs, partial))
            extents[first] = max(extents.get(first, 0), count)
    covered = np.zeros(rows, int)
    for first, count in extents.items():
        covered[first : first + count] += 1
    if (covered != 1).any():
        found.add("rows")
    merges = {m[0]: m for m in plan.merges.tolist() if m[1]}
    places = []
    for first, of_tile in pieces.items():
        of_tile.sort()
        ends = np.cumsum([pairs for _, pairs, _ in of_tile])
        if [pair for pair, *_ in of_tile] != [0, *ends[:-1]]:
            found.add("pairs")
        seen = plan.row_keys[np.arange(first, first + extents[first]) // heads]
        if ends[-1] * work.PAIR_KEYS < seen.max():
            found.add("keys left out")
        named = [partial for *_, partial in of_tile]
        if (len(of_tile) == 1 and named != [-1]) or (len(of_tile) > 1 and first not in merges):
            found.add("merges")
        if len(of_tile) > 1:
            _, count, start, end = merges.pop(first, (0, 0, 0, 0))
            if named != list(range(start, end)) or count != extents[first]:
                found.add("merges")
            places += named
    room = plan.num_partials
    if merges or len(set(places)) != len(places) or max(places, default=-1) >= max(room, 1):
        found.add("merges")
    return found


def random_batch(rng: np.random.Generator) -> dict[str, Any]:
    requests, world = int(rng.integers(1, 40)), int(rng.choice([1, 2, 4, 8]))
    query_lens = rng.integers(0, 17, requests)
    totals = rng.integers(0, 3) * rng.integers(0, 5000, requests) + rng.integers(0, 20, requests)
    group = {
        "dcp_rank": int(rng.integers(0, world)),
        "dcp_world": world,
        "interleave": int(rng.choice([1, 4, 64])),
    }
    return {
        "query_start_loc": np.cumsum([0, *query_lens]),
        "seq_lens": local_seq_lens(totals, **group),
        "total_lens": totals,
        "max_query_len": 16,
        "heads": int(rng.choice([1, 6, 16, 24, 48, 64, 96, 128])),
        "causal": bool(rng.integers(0, 4)),
        **group,
    }


@pytest.mark.parametrize("way", ["balanced", "capacity", "fixed", "few thread blocks"])
def test_random_batches_are_dealt_without_a_fault(way):
    rng = np.random.default_rng(1)
    cut = 0
    for _ in range(60):
        batch = random_batch(rng)
        options: dict[str, Any] = {}
        tokens, requests = int(batch["query_start_loc"][-1]), len(batch["total_lens"])
        if way == "capacity":
            capacity = DecodeCapacity(tokens=tokens + 3, requests=requests + 2)
            options = {"capacity": capacity}
        if way == "few thread blocks":
            options = {"capacity": DecodeCapacity(tokens=tokens, requests=requests, num_ctas=6)}
        if way == "fixed":
            options = {"split_keys": 256}
        plan = plan_decode(**batch, **options)
        assert violations(plan, batch["heads"]) == set()
        cut += plan.merges[:, work.MERGE_NUM_ROWS].any()
    assert cut > 0


def test_plans_of_one_capacity_are_one_kind_of_argument_for_a_jitted_function():
    """One structure, static fields included, and one shape and dtype of each array."""
    rng = np.random.default_rng(2)
    capacity = DecodeCapacity(tokens=40 * 17, requests=40)
    kinds = set()
    for _ in range(30):
        batch: dict[str, Any] = random_batch(rng) | {"heads": 16, "interleave": 4}
        arrays, structure = jax.tree.flatten(plan_decode(**batch, capacity=capacity))
        assert {a.dtype for a in arrays} == {np.dtype(np.int32)}
        kinds.add((structure, *(a.shape for a in arrays)))
    assert len(kinds) == 1


def plan_of(**changes) -> DecodePlan:
    batch: dict[str, Any] = dict(
        query_start_loc=[0, 2, 3], seq_lens=[400, 90], total_lens=[400, 90], max_query_len=2,
        heads=32, split_keys=128,
    )  # fmt: skip
    return plan_decode(**(batch | changes))


@pytest.mark.parametrize(
    ("number", "field", "by", "broken"),
    [
        (0, work.FIRST_ROW, 32, {"rows"}),
        (0, work.REQUEST, 1, {"request"}),
        (0, work.FIRST_PAIR, 1, {"pairs"}),
        (0, work.END, -1, {"mask"}),
        (0, work.FULL, 1, {"mask"}),
        (0, work.PARTIAL, 1, {"merges"}),
        (-1, work.NUM_ROWS, -1, {"rows"}),
    ],
)
def test_the_checker_names_what_a_wrong_plan_breaks(number, field, by, broken):
    plan = plan_of()
    assert violations(plan, 32) == set()
    plan.items[number, 0, field] += by
    assert violations(plan, 32) >= broken


def test_whole_units_go_longest_first_to_the_least_loaded():
    pieces = split.deal([4, 3, 3, 2], workers=2)
    assert [(p.worker, p.unit) for p in pieces] == [(0, 0), (0, 3), (1, 1), (1, 2)]


def test_a_long_unit_beside_short_ones_is_cut():
    pieces = split.deal([100, 1], workers=4)
    loads = np.zeros(4)
    for piece in pieces:
        loads[piece.worker] += piece.num_pairs + split.ITEM_COST
    assert loads.max() <= 1.1 * loads.mean()
    assert split.deal([], workers=4) == []


def test_fixed_cuts_depend_on_the_request_alone():
    pieces = split.deal_fixed([5, 2], workers=3, pairs_per_piece=2)
    cuts = sorted((p.unit, p.first_pair, p.num_pairs) for p in pieces)
    assert cuts == [(0, 0, 2), (0, 2, 2), (0, 4, 1), (1, 0, 2)]


def test_a_cluster_is_formed_where_tiles_find_a_neighbour():
    assert plan_of(heads=128).cluster == 2
    assert plan_of(heads=16).cluster == 1
    assert plan_of(heads=128, split_keys=None, capacity=DecodeCapacity(
        tokens=3, requests=2, cluster=1)).cluster == 1  # fmt: skip
