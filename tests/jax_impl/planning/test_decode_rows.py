"""Rows of decode batches: named ones, and 20,000 random ones by their invariants."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_impl.planning import decode_rows, is_ragged, local_key_counts, local_seq_lens, owner

DOCS = Path(__file__).parents[3] / "docs" / "planning-rules.md"


def test_the_examples_of_the_rules_are_right():
    module = importlib.import_module("jax_impl.planning.decode_rows")
    result = doctest.testmod(module)
    assert result.attempted > 10 and not result.failed


def test_the_examples_of_the_documentation_are_right():
    result = doctest.testfile(str(DOCS), module_relative=False)
    assert result.attempted > 5 and not result.failed


@pytest.mark.parametrize(
    ("query_lens", "max_query_len", "ragged"),
    [
        ([8, 8], 8, False),
        ([8], 8, False),
        ([1, 1, 1], 1, False),
        ([8, 8, 0, 0], 8, False),  # requests without tokens at the end are padding
        ([], 8, False),
        ([0, 0], 8, False),
        ([8, 2], 8, True),
        ([1, 7], 8, True),
        ([6, 2, 1], 6, True),
        ([3, 1], 3, True),
        ([8, 0, 8], 8, True),
        ([0, 8], 8, True),
        ([1, 1], 8, True),  # uniform, but not as promised
        ([5, 5], 8, True),
    ],
)
def test_a_batch_is_ragged_unless_each_request_owns_exactly_its_rows(
    query_lens, max_query_len, ragged
):
    assert is_ragged(np.cumsum([0, *query_lens]), max_query_len=max_query_len) == ragged


@pytest.mark.parametrize("query_lens", [[8, 2], [8, 0, 8]])
def test_padding_does_not_make_a_ragged_batch_uniform(query_lens):
    """With it, tokens == requests * 8: the count alone would be fooled."""
    padded = 8 * len(query_lens)
    rows = decode_rows(
        np.cumsum([0, *query_lens]), [30] * len(query_lens), max_query_len=8, num_rows=padded
    )
    assert rows.ragged
    assert rows.padding == padded - sum(query_lens)
    assert (rows.request[sum(query_lens) :] == -1).all()


def test_local_bounds_below_one_mean_that_nothing_is_seen():
    """FlashInfer's own tests: length 1 with 4 tokens; a bound of 1 over a rank's 2048 keys."""
    rows = decode_rows([0, 4], [1], max_query_len=4)
    assert rows.bound.tolist() == [-2, -1, 0, 1]
    for rank in range(2):
        group = {"dcp_rank": rank, "dcp_world": 2}
        assert local_key_counts(rows, [2048], **group).tolist() == [0, 0, 0, 1 - rank]


def test_rows_are_counted_by_looking_at_each_key():
    for interleave in (1, 4, 64):
        rows = decode_rows([0, 5, 6], [130, 3], max_query_len=5)
        ranks = owner(np.arange(130), dcp_world=3, interleave=interleave)
        for rank in range(3):
            group = {"dcp_rank": rank, "dcp_world": 3, "interleave": interleave}
            held = local_seq_lens([130, 3], **group)
            seen = [int((ranks[:bound] == rank).sum()) for bound in rows.bound]
            assert local_key_counts(rows, held, **group).tolist() == seen


def test_20000_random_batches_satisfy_every_invariant():
    rng = np.random.default_rng(0)
    for _ in range(20_000):
        requests = int(rng.integers(0, 7))
        query_lens = rng.integers(0, 5, requests)
        totals = rng.integers(0, 200, requests)
        offsets, padding = np.cumsum([0, *query_lens]), int(rng.integers(0, 3))
        tokens = int(offsets[-1])
        causal = bool(rng.integers(0, 4))
        rows = decode_rows(
            offsets, totals, max_query_len=4, causal=causal, num_rows=tokens + padding
        )
        assert rows.padding == padding and len(rows.bound) == len(rows.request) == tokens + padding
        # A request's rows, in order, and one key more for each if causal.
        np.testing.assert_array_equal(rows.request[:tokens], np.repeat(range(requests), query_lens))
        last = offsets[1:][query_lens > 0] - 1
        np.testing.assert_array_equal(rows.bound[last], totals[query_lens > 0])
        steps = np.diff(rows.bound[:tokens])[np.diff(rows.request[:tokens]) == 0]
        assert (steps == int(causal)).all()
        assert not rows.bound[tokens:].any() and (rows.request[tokens:] == -1).all()
        # What the ranks see adds up to the bound, and is a part of what they hold.
        world, run = int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 64]))
        total = np.zeros(tokens + padding, np.int64)
        for rank in range(world):
            group = {"dcp_rank": rank, "dcp_world": world, "interleave": run}
            held = local_seq_lens(totals, **group)
            counts = local_key_counts(rows, held, **group)
            assert (counts[:tokens] <= held[rows.request[:tokens]]).all()
            total += counts
        np.testing.assert_array_equal(total, np.maximum(rows.bound, 0))


BAD = [
    ({"query_start_loc": [0, 9]}, "max_query_len: 8, but request 0 of query_start_loc has 9"),
    ({"query_start_loc": [0, 2, 1]}, "query_start_loc.2.: 1 after 2"),
    ({"query_start_loc": [2, 3]}, "query_start_loc: starts with 2"),
    ({"query_start_loc": [0, 1, 2]}, "total_lens: 1 entries; accepted: one per request .*, 2"),
    ({"total_lens": [-1]}, "total_lens.0.: -1; accepted"),
    ({"total_lens": [1.5]}, "total_lens.0.: 1.5; accepted"),
    ({"total_lens": [2**63]}, f"total_lens.0.: {2**63}; accepted: integers from 0 to {2**63 - 1}"),
    ({"query_start_loc": [0, 2**64]}, f"query_start_loc.1.: {2**64}; accepted: integers from 0"),
    ({"num_rows": 2**63}, f"num_rows: {2**63}; accepted: an integer from 0 to 2147483647"),
    ({"num_rows": 2}, "num_rows: 2; accepted: at least query_start_loc.-1. = 3, or None"),
    ({"max_query_len": True}, "max_query_len: True; accepted: an integer >= 1"),
    ({"causal": None}, "causal: None; accepted: True or False"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_a_batch_that_is_none_is_refused_by_name(changes, message):
    batch: dict[str, Any] = dict(query_start_loc=[0, 3], total_lens=[9], max_query_len=8)
    with pytest.raises(ValueError, match=f"^{message}"):
        decode_rows(**(batch | changes))


def test_counts_need_a_length_of_each_request_that_has_rows():
    rows = decode_rows([0, 1, 2], [5, 5], max_query_len=1)
    for held in ([5], [5, 5, 5]):
        with pytest.raises(ValueError, match=f"^seq_lens: {len(held)} entries; accepted: one per"):
            local_key_counts(rows, held)


def test_counts_need_a_length_of_requests_without_rows_too():
    rows = decode_rows([0, 1, 1], [5, 5], max_query_len=1, num_rows=3)
    assert rows.num_requests == 2
    assert local_key_counts(rows, [5, 4]).tolist() == [5, 0, 0]
    with pytest.raises(ValueError, match=r"^seq_lens: 1 entries; accepted"):
        local_key_counts(rows, [5])


def test_the_largest_length_is_served_exactly():
    rows = decode_rows([0, 2], [2**63 - 1], max_query_len=2)
    assert rows.bound.tolist() == [2**63 - 2, 2**63 - 1]
    assert local_key_counts(rows, [2**62], dcp_world=2).tolist() == [2**62 - 1, 2**62]
