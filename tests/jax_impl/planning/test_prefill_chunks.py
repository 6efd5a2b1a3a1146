"""Named batches with their right plans in plain sight.

Most of them use ratio 1 and window 1: no compressed entries, one gathered row per query token,
and a workspace area of 1 + max_num_batched_tokens at chunk_size 1.
"""

from __future__ import annotations

import dataclasses
import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_impl.planning import (
    PrefillChunk,
    compressed_lens,
    gather_lens,
    max_workspace_area,
    plan_prefill_chunks,
    prefill_chunks,
)

PLANNING_RULES = Path(__file__).parents[3] / "docs" / "planning-rules.md"


def rows(plan):
    """(start, end, N, M, query_start, query_end) of each chunk."""
    return [dataclasses.astuple(chunk) for chunk in plan]


def tokens_plan(query_lens, *, area, seq_lens=None):
    """A plan whose workspace rows are query tokens and whose area is `area`."""
    return rows(
        plan_prefill_chunks(
            query_lens if seq_lens is None else seq_lens,
            query_lens,
            compress_ratio=1,
            window=1,
            max_model_len=64,
            max_num_batched_tokens=area - 1,
            chunk_size=1,
        )
    )


def test_padding_and_waiting_requests_form_no_chunk_of_their_own():
    settings: dict[str, Any] = dict(
        compress_ratio=4, window=8, max_model_len=64, max_num_batched_tokens=16
    )
    batch = [40, 40, 16, 64, 0], [0, 5, 0, 3, 0]
    assert max_workspace_area(chunk_size=1, **settings) == 40
    assert plan_prefill_chunks(*batch, chunk_size=1, **settings) == (
        PrefillChunk(1, 2, compressed_rows=10, workspace_rows=22, query_start=0, query_end=5),
        PrefillChunk(3, 4, compressed_rows=16, workspace_rows=26, query_start=5, query_end=8),
    )


@pytest.mark.parametrize(
    ("query_lens", "expected"),
    [
        pytest.param([0, 0, 2, 1], [(2, 4, 0, 2, 0, 3)], id="leading"),
        pytest.param([2, 1, 0, 0], [(0, 2, 0, 2, 0, 3)], id="trailing"),
        pytest.param([2, 0, 1], [(0, 3, 0, 2, 0, 3)], id="middle-that-fits"),
        pytest.param([2, 0, 0, 1], [(0, 1, 0, 2, 0, 2), (3, 4, 0, 1, 2, 3)], id="middle-too-many"),
        pytest.param([0, 3, 0, 3, 0], [(1, 2, 0, 3, 0, 3), (3, 4, 0, 3, 3, 6)], id="alternating"),
        pytest.param([0, 0, 4, 0], [(2, 3, 0, 4, 0, 4)], id="single-nonzero"),
        pytest.param([0, 0, 0], [], id="all-zero"),
        pytest.param([], [], id="no-requests"),
    ],
)
def test_zero_query_requests_in_an_area_of_six(query_lens, expected):
    assert tokens_plan(query_lens, area=6) == expected


def test_zeros_right_behind_a_full_chunk_are_passed_over():
    assert tokens_plan([4, 0, 0, 4], area=4) == [(0, 1, 0, 4, 0, 4), (3, 4, 0, 4, 4, 8)]


@pytest.mark.parametrize(
    ("area", "expected"),
    [
        (9, [(0, 3, 0, 3, 0, 6)]),
        (8, [(0, 2, 0, 2, 0, 3), (2, 3, 0, 3, 3, 6)]),
    ],
)
def test_a_request_joins_at_exactly_the_area_and_not_one_row_beyond(area, expected):
    assert tokens_plan([1, 2, 3], area=area) == expected


def test_area_is_tested_with_union_maxima_and_not_with_sums():
    settings: dict[str, Any] = dict(compress_ratio=2, window=1, max_model_len=8, chunk_size=1)
    batch = [8, 4], [1, 4]  # 4 compressed + 1 window row, 2 compressed + 4 window rows
    together = plan_prefill_chunks(*batch, max_num_batched_tokens=11, **settings)
    apart = plan_prefill_chunks(*batch, max_num_batched_tokens=10, **settings)
    assert rows(together) == [(0, 2, 4, 8, 0, 5)]
    assert rows(apart) == [(0, 1, 4, 5, 0, 1), (1, 2, 2, 6, 1, 5)]


def test_only_the_area_limits_the_number_of_requests():
    assert tokens_plan([1] * 100, area=100) == [(0, 100, 0, 1, 0, 100)]


def test_one_request_beyond_the_area_gets_a_chunk_of_its_own():
    assert tokens_plan([1, 9, 1], area=4) == [
        (0, 1, 0, 1, 0, 1),
        (1, 2, 0, 9, 1, 10),
        (2, 3, 0, 1, 10, 11),
    ]


def test_context_beyond_max_model_len_is_planned_all_the_same():
    plan = plan_prefill_chunks(
        [100], [100], compress_ratio=4, window=8, max_model_len=8, max_num_batched_tokens=4
    )
    assert rows(plan) == [(0, 1, 25, 125, 0, 100)]


LONGEST_WAITS: dict[str, Any] = dict(compress_ratio=4, window=8, max_model_len=4096, chunk_size=4)


def test_interior_waiting_request_with_the_longest_context_is_covered():
    plan = plan_prefill_chunks([8, 4096, 9], [8, 0, 2], max_num_batched_tokens=16, **LONGEST_WAITS)
    # N is the waiting request's 4096 / 4; window rows are 8, 7 and 2 + 7, so M - N is 9.
    assert rows(plan) == [(0, 3, 1024, 1033, 0, 10)]


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "start"),
    [([4096, 8, 9], [0, 8, 2], 1), ([8, 9, 4096], [8, 2, 0], 0)],
    ids=["leading", "trailing"],
)
def test_waiting_request_outside_every_chunk_sizes_none(seq_lens, query_lens, start):
    plan = plan_prefill_chunks(seq_lens, query_lens, max_num_batched_tokens=16, **LONGEST_WAITS)
    assert rows(plan) == [(start, start + 2, 2, 11, 0, 10)]


def test_waiting_request_too_long_for_the_area_ends_the_chunk_and_is_dropped():
    tight: dict[str, Any] = LONGEST_WAITS | {"chunk_size": 1}
    plan = plan_prefill_chunks([8, 4096, 9], [8, 0, 2], max_num_batched_tokens=16, **tight)
    assert rows(plan) == [(0, 1, 2, 10, 0, 8), (2, 3, 2, 11, 8, 10)]


@pytest.mark.parametrize(
    ("ratio", "has_compressed", "expected"),
    [
        (0, None, (0, 0, 0)),
        (0, False, (0, 0, 0)),
        (1, None, (0, 0, 0)),
        (1, True, (0, 127, 257)),
        (2, None, (0, 63, 128)),
        (4, None, (0, 31, 64)),
        (128, None, (0, 0, 2)),
        (128, False, (0, 0, 0)),
    ],
)
def test_compressed_lens_count_whole_entries(ratio, has_compressed, expected):
    lens = compressed_lens([0, 127, 257], compress_ratio=ratio, has_compressed=has_compressed)
    assert lens == expected


def test_gather_lens_add_at_most_the_window_less_one():
    contexts, queries = [5, 131, 132, 133, 1000], [5, 5, 5, 5, 0]
    assert gather_lens(contexts, queries) == (5, 131, 132, 132, 127)
    assert gather_lens(contexts, queries, window=1) == (5, 5, 5, 5, 0)


def test_area_has_no_compressed_part_without_compressed_entries():
    engine: dict[str, Any] = dict(
        max_model_len=1001, max_num_batched_tokens=100, window=28, chunk_size=4
    )
    assert max_workspace_area(compress_ratio=4, **engine) == 4 * (251 + 128)
    assert max_workspace_area(compress_ratio=1, has_compressed=True, **engine) == 4 * (1001 + 128)
    for ratio, given in [(0, None), (1, None), (4, False)]:
        area = max_workspace_area(compress_ratio=ratio, has_compressed=given, **engine)
        assert area == 4 * 128


def test_rows_beyond_32_bits_neither_wrap_nor_round():
    long = 2**31 - 1
    plan = plan_prefill_chunks(
        np.array([long, long], np.int32),
        np.array([long, long], np.int32),
        compress_ratio=2,
        max_model_len=long,
        max_num_batched_tokens=long,
        chunk_size=1,
    )
    n, m = (long - 1) // 2, (long - 1) // 2 + long
    assert rows(plan) == [(0, 1, n, m, 0, long), (1, 2, n, m, long, 2 * long)]


def test_rule_docstrings_show_what_the_planner_does():
    result = doctest.testmod(prefill_chunks)
    assert result.attempted >= 20
    assert result.failed == 0


def test_worked_examples_of_the_document_are_true():
    result = doctest.testfile(str(PLANNING_RULES), module_relative=False)
    assert result.attempted >= 5
    assert result.failed == 0
