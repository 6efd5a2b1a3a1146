"""Prefill planning: known plans, P1 to P7 over random batches, and the shipped rules."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ref.planning import (
    PrefillChunk,
    Rules,
    compressed_lens,
    gather_lens,
    gathers_compressed,
    plan_prefill_chunks,
    workspace_area_limit,
)

EXAMPLE: dict[str, Any] = {
    "compress_ratio": 4,
    "window": 8,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "chunk_size": 1,
}


def plan(seq_lens, query_lens, *, rules: Rules = "fixed", **changes):
    return plan_prefill_chunks(seq_lens, query_lens, rules=rules, **(EXAMPLE | changes))


def test_requests_without_queries_get_no_chunk():
    assert plan([40, 40, 16, 64, 0], [0, 5, 0, 3, 0]) == (
        PrefillChunk(1, 2, 10, 22, 0, 5),
        PrefillChunk(3, 4, 16, 26, 5, 8),
    )


def test_the_shipped_rules_emit_chunks_without_queries():
    shipped = plan([40, 40, 16, 64, 0], [0, 5, 0, 3, 0], rules="vllm-0.33.0")
    assert [chunk.empty for chunk in shipped] == [True, False, True, False, True]
    assert [(chunk.query_start, chunk.query_end) for chunk in shipped] == [
        (0, 0),
        (0, 5),
        (5, 5),
        (5, 8),
        (8, 8),
    ]


@pytest.mark.parametrize("query_lens", [[], [0], [0, 0, 0]])
def test_nothing_to_do_is_an_empty_plan(query_lens):
    assert plan([40] * len(query_lens), query_lens) == ()


def test_a_zero_query_request_inside_a_chunk_sizes_it():
    # 64 tokens without a query: 16 compressed and 7 gathered rows; its neighbours need 3 and 12.
    assert plan([12, 64, 12], [5, 0, 5], chunk_size=3) == (PrefillChunk(0, 3, 16, 28, 0, 10),)


@pytest.mark.parametrize(("between", "chunk_size"), [(64, 2), (12, 1)])
def test_a_zero_query_request_that_does_not_fit_splits_the_chunk(between, chunk_size):
    # 3 * (16 + 12) = 84 of 80 rows; 3 * (3 + 12) = 45 of 40, where its neighbours take 30.
    assert plan([12, between, 12], [5, 0, 5], chunk_size=chunk_size) == (
        PrefillChunk(0, 1, 3, 15, 0, 5),
        PrefillChunk(2, 3, 3, 15, 5, 10),
    )


def test_a_zero_query_request_inside_a_chunk_widens_the_gathered_rows_too():
    # Without compressed keys: 7 rows of window for the one between, 2 for its neighbours.
    chunks = plan([2, 64, 2], [2, 0, 2], compress_ratio=1)
    assert chunks == (PrefillChunk(0, 3, 0, 7, 0, 4),)


def test_a_trailing_zero_query_request_sizes_nothing():
    assert plan([12, 64], [5, 0], chunk_size=4) == (PrefillChunk(0, 1, 3, 15, 0, 5),)


def test_area_equal_to_the_limit_still_joins():
    # two requests of 10 compressed and 10 gathered rows; limit 40, then 39
    assert workspace_area_limit(**EXAMPLE) == 40
    assert len(plan([40, 40], [3, 3])) == 1
    assert len(plan([40, 40], [3, 3], max_num_batched_tokens=15)) == 2


def test_one_request_over_the_limit_has_its_own_chunk():
    assert plan([400, 8, 8], [300, 2, 2])[0] == PrefillChunk(0, 1, 100, 407, 0, 300)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"max_model_len": 65, "chunk_size": 3}, 123),  # 3 * (17 + 8 + 16)
        ({"compress_ratio": 1}, 24),
        ({"compress_ratio": 1, "has_compressed": True}, 88),
    ],
)
def test_the_area_limit_rounds_compressed_rows_up(changes, rows):
    assert workspace_area_limit(**(EXAMPLE | changes)) == rows


def test_lengths_of_the_parts():
    assert compressed_lens([0, 3, 4, 9], compress_ratio=4) == (0, 0, 1, 2)
    assert compressed_lens([9], compress_ratio=1) == (0,)
    assert compressed_lens([9], compress_ratio=1, has_compressed=True) == (9,)
    assert gather_lens([300, 300, 100, 5], [300, 1, 100, 0], window=128) == (300, 128, 100, 5)
    assert gathers_compressed(0) is False and gathers_compressed(2) is True
    assert gathers_compressed(128, has_compressed=False) is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": [1]}, "query_lens: 1 requests; seq_lens has 2"),
        ({"seq_lens": [4, -1]}, "seq_lens: -1 for request 1; accepted are 0 and more"),
        ({"query_lens": [1, 1.5]}, "query_lens: 'float' object"),
        ({"query_lens": [True, 1]}, "query_lens: a bool is no number here"),
        ({"compress_ratio": -1}, "compress_ratio: -1"),
        ({"compress_ratio": 2.5}, "compress_ratio: 'float' object"),
        ({"compress_ratio": None}, "compress_ratio: 'NoneType' object"),
        ({"has_compressed": "yes"}, "has_compressed: 'yes'; accepted are True, False and None"),
        ({"compress_ratio": 0, "has_compressed": True}, "compress_ratio: 0 with has_compressed"),
        ({"window": 0}, "window: 0; accepted are 1 and more"),
        ({"max_model_len": 0}, "max_model_len: 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: 0"),
        ({"chunk_size": 0}, "chunk_size: 0"),
        ({"rules": "latest"}, "rules: 'latest'; accepted are 'fixed' and 'vllm-0.33.0'"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"seq_lens": [4, 4], "query_lens": [1, 1], **EXAMPLE} | changes
    with pytest.raises(ValueError, match=f"^{message}"):
        plan_prefill_chunks(**arguments)


def test_planning_needs_no_torch():
    code = "import sys, torch_ref.planning; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@st.composite
def batches(draw, *, zeros: bool = True):
    """seq_lens, query_lens and settings; with zeros, about half of the requests have no query."""
    queries = st.integers(1, 40)
    if zeros:
        queries = st.one_of(st.just(0), queries)
    query_lens = draw(st.lists(queries, max_size=24))
    prefixes = draw(
        st.lists(
            st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 400)),
            min_size=len(query_lens),
            max_size=len(query_lens),
        )
    )
    options: dict[str, Any] = {
        "compress_ratio": draw(st.sampled_from([0, 1, 2, 4, 128])),
        "window": draw(st.sampled_from([1, 8, 128])),
        "max_model_len": draw(st.integers(1, 512)),
        "max_num_batched_tokens": draw(st.integers(1, 64)),
        "chunk_size": draw(st.integers(1, 4)),
    }
    if options["compress_ratio"] > 0:
        options["has_compressed"] = draw(st.sampled_from([None, True, False]))
    seq_lens = [a + b for a, b in zip(prefixes, query_lens, strict=True)]
    return seq_lens, query_lens, options


def parts(seq_lens, query_lens, options):
    """N and G of each request, and the area limit, from their definitions."""
    ratio, window = options["compress_ratio"], options["window"]
    has = options.get("has_compressed")
    has = ratio > 1 if has is None else has
    N = [s // ratio if has else 0 for s in seq_lens]
    G = [q + min(s - q, window - 1) for s, q in zip(seq_lens, query_lens, strict=True)]
    longest = -(-options["max_model_len"] // ratio) if has else 0
    limit = options["chunk_size"] * (longest + window + options["max_num_batched_tokens"])
    return N, G, limit


@settings(max_examples=400, deadline=None)
@given(batches())
def test_fixed_plans_keep_every_invariant(batch):
    seq_lens, query_lens, options = batch
    N, G, limit = parts(*batch)
    chunks = plan_prefill_chunks(seq_lens, query_lens, **options)

    def area(start, end):
        return (end - start) * (max(N[start:end]) + max(G[start:end]))

    covered, before = [], 0
    for k, c in enumerate(chunks):
        members = range(c.start, c.end)
        assert before <= c.start < c.end <= len(query_lens)  # P2, in order and disjoint
        before = c.end
        assert query_lens[c.start] > 0 and query_lens[c.end - 1] > 0  # P1, P3, P4
        assert c.query_start == sum(query_lens[: c.start])
        assert c.query_end == sum(query_lens[: c.end])
        covered += [i for i in members if query_lens[i]]
        assert c.compressed_rows == max(N[i] for i in members)  # P6, exactly the maxima
        assert c.workspace_rows - c.compressed_rows == max(G[i] for i in members)
        assert len(members) == 1 or c.area <= limit
        if k + 1 < len(chunks):  # P7 without its exemption: the zero-query ones are taken in
            assert area(c.start, chunks[k + 1].start + 1) > limit
    assert covered == [i for i, query in enumerate(query_lens) if query]  # P2


@settings(max_examples=300, deadline=None)
@given(batches(zeros=False))
def test_without_empty_queries_both_rules_give_one_plan(batch):
    seq_lens, query_lens, options = batch
    fixed = plan_prefill_chunks(seq_lens, query_lens, **options)
    shipped = plan_prefill_chunks(seq_lens, query_lens, rules="vllm-0.33.0", **options)
    assert fixed == shipped


@settings(max_examples=300, deadline=None)
@given(batches())
def test_shipped_plans_tile_all_requests_greedily(batch):
    seq_lens, query_lens, options = batch
    N, G, limit = parts(*batch)
    chunks = plan_prefill_chunks(seq_lens, query_lens, rules="vllm-0.33.0", **options)
    assert [i for c in chunks for i in range(c.start, c.end)] == list(range(len(query_lens)))
    for c in chunks:
        longer = c.end + 1
        if c.end < len(query_lens):
            rows = max(N[c.start : longer]) + max(G[c.start : longer])
            assert (longer - c.start) * rows > limit
        assert c.end - c.start == 1 or c.area <= limit
