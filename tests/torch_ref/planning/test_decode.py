"""Decode planning: known rows and bounds, the shipped rules, 20,000 random batches by counting."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest

from tests.torch_ref.decode.problems import owned
from torch_ref.planning import (
    BoundsShapeMismatch,
    NonUniformBlock,
    check_shard,
    decode_rows,
    global_position,
    local_key_counts,
    local_position,
    local_seq_lens,
    owner_rank,
)


def rows(query_lens, totals, *, m=None, **options):
    starts = [0, *accumulate(query_lens)]
    return decode_rows(starts, totals, max_query_len=m or max((1, *query_lens)), **options)


def test_rows_of_a_ragged_batch_whose_tokens_divide_by_its_requests():
    # vllm-project/vllm#52500: 9 tokens of 3 requests; a view as 3 + 3 + 3 raises no error.
    plan = rows([6, 2, 1], [20, 9, 4])
    assert plan.ragged
    assert plan.request == (0, 0, 0, 0, 0, 0, 1, 1, 2)
    assert plan.bound == (15, 16, 17, 18, 19, 20, 8, 9, 4)
    assert plan.padding == (False,) * 9


def test_rows_of_a_draft_block_see_all_of_their_request():
    # vllm-project/vllm#54277
    assert rows([3], [17], causal=False).bound == (17, 17, 17)
    assert rows([3], [17]).bound == (15, 16, 17)


def test_bounds_go_below_one_where_a_request_has_fewer_keys_than_tokens():
    assert rows([4], [1]).bound == (-2, -1, 0, 1)


@pytest.mark.parametrize(
    ("query_lens", "m", "num_rows", "ragged"),
    [
        ([8, 8], 8, None, False),
        ([8, 8, 0, 0], 8, None, False),  # requests without tokens at the end are padding
        ([8, 8], 8, 20, False),  # so are rows
        ([0, 0], 8, 4, False),
        ([], 8, None, False),
        ([8, 2], 8, None, True),
        ([8, 2], 8, 16, True),  # 16 = 2 * 8
        ([8, 0, 8], 8, 24, True),  # 24 = 3 * 8
        ([0, 8], 8, None, True),
        ([1, 1, 1], 8, None, True),  # uniform, but not at the promised length
        ([2, 2], 2, None, False),
        ([3, 1], 3, None, True),
        ([1, 1, 8], 8, None, True),
    ],
)
def test_a_batch_is_uniform_only_if_each_request_owns_exactly_its_rows(
    query_lens, m, num_rows, ragged
):
    totals = [300] * len(query_lens)
    assert rows(query_lens, totals, m=m, num_rows=num_rows).ragged is ragged


def test_padded_rows_see_nothing():
    plan = rows([8, 2], [301, 97], num_rows=16)
    assert plan.bound == (*range(294, 302), 96, 97, 0, 0, 0, 0, 0, 0)
    assert plan.padding == (False,) * 10 + (True,) * 6
    assert local_key_counts(plan, [301, 97])[10:] == (0,) * 6


def test_the_shipped_rules_meet_rows_of_tokens_with_bounds_of_requests():
    with pytest.raises(BoundsShapeMismatch, match=r"^2 bounds for 9 rows: 9 tokens over 2") as it:
        rows([8, 1], [301, 97], rules="vllm-0.33.0")
    assert (it.value.rows, it.value.bounds) == (9, 2)


def test_the_shipped_rules_view_8_and_2_as_5_and_5():
    shipped = rows([8, 2], [301, 97], rules="vllm-0.33.0")
    assert not shipped.ragged
    assert shipped.request == (0,) * 5 + (1,) * 5
    # right: 294 .. 301 of request 0, then 96 97; the last two are right by luck
    assert shipped.bound == (297, 298, 299, 300, 301, 93, 94, 95, 96, 97)


def test_the_shipped_rules_view_8_and_2_and_6_of_padding_as_8_and_8():
    shipped = rows([8, 2], [301, 97], num_rows=16, rules="vllm-0.33.0")
    assert shipped.request[8:10] == (1, 1)
    assert shipped.bound[8:10] == (90, 91)  # right: 96, 97
    assert shipped.padding[10:] == (True,) * 6


def test_both_rules_agree_on_uniform_batches():
    for query_lens in ([8, 8], [1, 1, 1], [5]):
        totals = [50 + 7 * i for i in range(len(query_lens))]
        shipped = rows(query_lens, totals, rules="vllm-0.33.0")
        assert shipped == rows(query_lens, totals)


def test_the_shipped_rules_refuse_a_draft_block_of_two_lengths():
    with pytest.raises(NonUniformBlock, match=r"^query lengths \[3, 2\]: vLLM 0.33.0"):
        rows([3, 2], [17, 9], causal=False, rules="vllm-0.33.0")
    padded = rows([3, 3, 0], [17, 9, 0], causal=False, num_rows=8, rules="vllm-0.33.0")
    assert padded.bound == (17, 17, 17, 9, 9, 9, 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_lens": [5]}, "total_lens: 1 lengths; query_start_loc has 2 requests"),
        ({"total_lens": [5, -1]}, "total_lens: -1 for request 1"),
        ({"total_lens": [5, 2.5]}, "total_lens: 'float' object"),
        ({"query_start_loc": [1, 3, 4]}, "query_start_loc: starts with 1"),
        ({"query_start_loc": []}, "query_start_loc: starts with nothing"),
        ({"query_start_loc": [0, 3, 2]}, "query_start_loc: falls from 3 to 2 at request 1"),
        ({"max_query_len": 2}, "max_query_len: 2; request 0 has 3 query tokens"),
        ({"max_query_len": 0}, "max_query_len: 0; accepted are 1 and more"),
        ({"max_query_len": 1.5}, "max_query_len: 'float' object"),
        ({"num_rows": 3}, "num_rows: 3; query_start_loc counts 4 query tokens"),
        ({"causal": "no"}, "causal: 'no'; accepted are True and False"),
        ({"causal": 0}, "causal: 0; accepted are True and False"),
        ({"rules": "latest"}, "rules: 'latest'; accepted are 'fixed' and 'vllm-0.33.0'"),
    ],
)
def test_bad_batches_are_named(changes, message):
    arguments: dict[str, Any] = {
        "query_start_loc": [0, 3, 4],
        "total_lens": [9, 9],
        "max_query_len": 3,
    }
    with pytest.raises(ValueError, match=f"^{message}"):
        decode_rows(**(arguments | changes))


@pytest.mark.parametrize("interleave", [1, 4, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_each_position_has_one_owner_and_one_place(world, interleave):
    totals = {0, 1, world - 1, world, world + 1, 3 * world * interleave + 2}
    for total in totals | {interleave, interleave + 1, 2 * interleave * world - 1}:
        found = []
        for rank in range(world):
            shard = {"dcp_rank": rank, "dcp_world": world, "interleave": interleave}
            places = owned(total, rank, world, interleave)
            assert local_seq_lens([total], **shard) == (len(places),)
            assert (not places) == (total <= rank * interleave)
            assert [global_position(k, **shard) for k in range(len(places))] == places
            for k, g in enumerate(places):
                assert owner_rank(g, dcp_world=world, interleave=interleave) == rank
                assert local_position(g, dcp_world=world, interleave=interleave) == k
            found += places
        assert sorted(found) == list(range(total))


def test_local_lengths_of_a_prompt_shorter_than_the_world():
    # vllm-project/vllm#38416
    lengths = [local_seq_lens([3], dcp_rank=rank, dcp_world=8) for rank in range(8)]
    assert lengths == [(1,), (1,), (1,), (0,), (0,), (0,), (0,), (0,)]


def test_a_bound_is_localised_after_the_tokens_behind_are_taken_off():
    # 8 tokens of 16 keys: the first sees 0..8, of which rank 0 of 2 holds five; not 8 - 7 = 1.
    plan = rows([8], [16])
    assert local_key_counts(plan, [8], dcp_rank=0, dcp_world=2) == (5, 5, 6, 6, 7, 7, 8, 8)
    assert local_key_counts(plan, [8], dcp_rank=1, dcp_world=2) == (4, 5, 5, 6, 6, 7, 7, 8)


def test_key_counts_never_pass_the_local_length():
    # A bound of 1 over 2048 keys, and one of 126 over 128 (both as FlashInfer's own tests have it).
    assert local_key_counts(rows([1], [1]), [2048], dcp_world=2) == (1,)
    assert local_key_counts(rows([1], [1]), [2048], dcp_rank=1, dcp_world=2) == (0,)
    assert local_key_counts(rows([1], [126]), [128]) == (126,)
    assert local_key_counts(rows([1], [126]), [5]) == (5,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dcp_rank": 2}, "dcp_rank: 2; accepted are 0 to 1 with dcp_world = 2"),
        ({"dcp_rank": -1}, "dcp_rank: -1; accepted are 0 to 1"),
        ({"dcp_world": 0}, "dcp_world: 0; accepted are 1 and more"),
        ({"interleave": 0}, "interleave: 0; accepted are 1 and more"),
        ({"page_size": 32, "interleave": 3}, "interleave: 3 with pages of 32 keys"),
        ({"page_size": 32, "interleave": 64}, "interleave: 64 with pages of 32 keys"),
    ],
)
def test_impossible_shards_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check_shard(**({"dcp_rank": 1, "dcp_world": 2, "interleave": 1} | changes))


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 0]])
@pytest.mark.parametrize("rules", ["fixed", "vllm-0.33.0"])
def test_key_counts_want_a_length_for_each_request_and_no_more(query_lens, rules):
    plan = rows(query_lens, [3, 3], num_rows=2, rules=rules)
    assert len(local_key_counts(plan, [3, 3])) == 2
    for local in ([3], [3, 9, 9]):
        with pytest.raises(
            ValueError, match=f"^seq_lens: {len(local)} lengths; the rows are of 2 requests"
        ):
            local_key_counts(plan, local)


def random_batch(r: random.Random):
    query_lens = [r.choice((0, 1, 1, 2, r.randint(0, 16))) for _ in range(r.randint(0, 6))]
    totals = [max(0, q + r.choice((0, 1, 40, r.randint(-3, 90)))) for q in query_lens]
    world, interleave = r.choice((1, 2, 3, 4, 8)), r.choice((1, 2, 4, 64))
    return query_lens, totals, world, interleave


def test_20000_random_batches_by_counting():
    r = random.Random(59065)
    ragged_seen = 0
    for _ in range(20_000):
        query_lens, totals, world, interleave = random_batch(r)
        m = max((1, *query_lens)) + r.choice((0, 0, 3))
        padding = r.choice((0, 0, 5))
        real = sum(query_lens)
        plan = rows(query_lens, totals, m=m, num_rows=real + padding)

        assert plan.padding == (False,) * real + (True,) * padding
        assert plan.request[:real] == tuple(b for b, q in enumerate(query_lens) for _ in range(q))
        assert plan.bound[:real] == tuple(
            totals[b] - later for b, q in enumerate(query_lens) for later in range(q - 1, -1, -1)
        )
        trimmed = list(query_lens)
        while trimmed and trimmed[-1] == 0:
            trimmed.pop()
        assert plan.ragged == any(q != m for q in trimmed)
        ragged_seen += plan.ragged

        columns = [0] * len(plan.bound)
        for rank in range(world):
            shard = {"dcp_rank": rank, "dcp_world": world, "interleave": interleave}
            local = local_seq_lens(totals, **shard)
            counts = local_key_counts(plan, local, **shard)
            columns = [a + b for a, b in zip(columns, counts, strict=True)]
            # Visible local keys are a prefix: those of the row's request that lie below its bound.
            t = r.randrange(real) if real else None
            if t is not None:
                places = owned(totals[plan.request[t]], rank, world, interleave)
                seen = [g < plan.bound[t] for g in places]
                assert seen == [k < counts[t] for k in range(len(places))]
        assert columns == [max(bound, 0) for bound in plan.bound]
    assert 5_000 < ragged_seen < 19_000
