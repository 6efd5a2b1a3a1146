"""Plans of random batches against the invariants P1 to P7, written apart from the planner.

`violations` reads a plan as bare rows and re-derives every quantity from the batch by its
definition, so that it shares nothing with the planner but the words of docs/planning-rules.md.
It also holds the plan to this project's variant: zero-query requests between two others stay.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_impl.planning import plan_prefill_chunks

RANDOM_BATCHES = 20_000


@dataclass(frozen=True)
class Batch:
    seq_lens: list[int]
    query_lens: list[int]
    ratio: int
    window: int
    max_model_len: int
    max_num_batched_tokens: int
    chunk_size: int
    has_compressed: bool | None = None

    def plan(self):
        chunks = plan_prefill_chunks(
            self.seq_lens,
            self.query_lens,
            compress_ratio=self.ratio,
            window=self.window,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunk_size=self.chunk_size,
            has_compressed=self.has_compressed,
        )
        return [dataclasses.astuple(chunk) for chunk in chunks]

    def compressed(self, i):
        has = self.ratio > 1 if self.has_compressed is None else self.has_compressed
        return self.seq_lens[i] // self.ratio if has else 0

    def gathered(self, i):
        first_position = self.seq_lens[i] - self.query_lens[i]
        oldest_visible = max(0, first_position - self.window + 1)
        return self.seq_lens[i] - oldest_visible

    def area_limit(self):
        has = self.ratio > 1 if self.has_compressed is None else self.has_compressed
        longest = ceil(self.max_model_len / self.ratio) if has else 0
        return self.chunk_size * (longest + self.window + self.max_num_batched_tokens)

    def width(self, start, end):
        """(N, M - N) that the requests [start, end) need together."""
        requests = range(start, end)
        return max(map(self.compressed, requests)), max(map(self.gathered, requests))

    def fits(self, start, end):
        return (end - start) * sum(self.width(start, end)) <= self.area_limit()


def violations(batch, plan):
    """The names of the invariants that `plan`, rows (start, end, N, M, q0, q1), breaks."""
    q, found = batch.query_lens, set()
    busy = [i for i, tokens in enumerate(q) if tokens > 0]
    for start, end, n, m, q0, q1 in plan:
        if not (0 <= start < end <= len(q)) or (q0, q1) != (sum(q[:start]), sum(q[:end])):
            return {"range"}
        if q1 <= q0:
            found.add("P1")
        if q[start] == 0:
            found.add("P3")
        if q[end - 1] == 0:
            found.add("P4")
        need_n, need_rows = batch.width(start, end)
        if n < need_n or m - n < need_rows:
            found.add("P6")
        if end - start > 1 and (end - start) * m > batch.area_limit():
            found.add("P6")
        if (n, m) != (need_n, need_n + need_rows):
            found.add("maxima")
        following = next((i for i in busy if i >= end), None)
        if following is not None and batch.fits(start, following + 1):
            found.add("P7")
    if any(after[0] < before[1] for before, after in pairwise(plan)):
        found.add("P2")
    covered = Counter(i for start, end, *_ in plan for i in range(start, end) if q[i] > 0)
    if covered != Counter(busy):
        found.add("P2")
    if not busy and plan:
        found.add("P4")
    return found


def plan_of_nonempty_requests(batch):
    """The engine's greedy rule, which has no notion of a request without query tokens (P5)."""
    plan, start = [], 0
    while start < len(batch.query_lens):
        end = start + 1
        while end < len(batch.query_lens) and batch.fits(start, end + 1):
            end += 1
        n, rows = batch.width(start, end)
        q0, q1 = sum(batch.query_lens[:start]), sum(batch.query_lens[:end])
        plan.append((start, end, n, n + rows, q0, q1))
        start = end
    return plan


def random_batch(rng, *, zeros):
    """Sizes around the area limit, so that chunks of one and of many requests are both common."""
    ratio = rng.choice([1, 1, 2, 4, 128])
    max_model_len = rng.choice([1, 16, 64, 500, 8192])
    max_tokens = rng.choice([1, 8, 64, 256])
    seq_lens, query_lens = [], []
    for _ in range(rng.randrange(0, 13)):
        longest = max_model_len if rng.random() < 0.5 else min(max_model_len, 24)
        idle = rng.random() < zeros
        context = rng.randint(0 if idle else 1, longest)
        seq_lens.append(context)
        query_lens.append(0 if idle else rng.randint(1, min(context, max_tokens)))
    return Batch(
        seq_lens,
        query_lens,
        ratio,
        window=rng.choice([1, 8, 128]),
        max_model_len=max_model_len,
        max_num_batched_tokens=max_tokens,
        chunk_size=rng.choice([1, 1, 2, 4]),
        has_compressed=rng.choice([None, None, True, False]),
    )


def test_random_batches_satisfy_every_invariant():
    rng = random.Random(20_000)
    seen = Counter()
    for number in range(RANDOM_BATCHES):
        batch = random_batch(rng, zeros=rng.choice([0.1, 0.5, 0.9]))
        plan = batch.plan()
        assert violations(batch, plan) == set(), f"batch {number}: {batch} -> {plan}"
        seen["empty plan"] += bool(batch.query_lens) and not plan
        seen["several chunks"] += len(plan) > 1
        seen["zero inside"] += any(0 in batch.query_lens[s:e] for s, e, *_ in plan)
        seen["zero at a break"] += any(a[1] < b[0] for a, b in pairwise(plan))
    # The run means something only if it met every kind of batch often.
    assert len(seen) == 4
    assert min(seen.values()) > RANDOM_BATCHES // 50, seen


def test_random_batches_without_zeros_equal_the_greedy_rule():
    rng = random.Random(1)
    several = 0
    for number in range(RANDOM_BATCHES // 4):
        batch = random_batch(rng, zeros=0)
        expected = plan_of_nonempty_requests(batch)
        assert batch.plan() == expected, f"batch {number}: {batch}"
        several += len(expected) > 1
    assert several > 500


@st.composite
def small_batches(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=6))
    return Batch(
        [tokens + before for tokens, before in requests],
        [tokens for tokens, _ in requests],
        ratio=draw(st.integers(1, 4)),
        window=draw(st.integers(1, 4)),
        max_model_len=draw(st.integers(1, 16)),
        max_num_batched_tokens=draw(st.integers(1, 8)),
        chunk_size=draw(st.integers(1, 3)),
        has_compressed=draw(st.sampled_from([None, True, False])),
    )


@given(small_batches())
def test_small_batches_satisfy_every_invariant_even_outside_the_engines_range(batch):
    assert violations(batch, batch.plan()) == set()


@given(small_batches(), st.integers(0, 4), st.integers(0, 4))
def test_zeros_around_a_batch_shift_its_plan_and_change_nothing_else(batch, before, behind):
    waiting = [max(batch.seq_lens, default=0) + 50]
    padded = dataclasses.replace(
        batch,
        seq_lens=waiting * before + batch.seq_lens + waiting * behind,
        query_lens=[0] * before + batch.query_lens + [0] * behind,
    )
    assert padded.plan() == [(s + before, e + before, *rest) for s, e, *rest in batch.plan()]


# seq_lens = query_lens, ratio 1 and window 1: a workspace row is a query token, the area is 6.
TOKENS = Batch([2, 0, 1, 0, 6], [2, 0, 1, 0, 6], 1, 1, 64, 5, 1)
RIGHT = [(0, 3, 0, 2, 0, 3), (4, 5, 0, 6, 3, 9)]
SECOND = RIGHT[1]


def test_the_right_plan_of_the_planted_faults_is_accepted():
    assert TOKENS.plan() == RIGHT
    assert violations(TOKENS, RIGHT) == set()


@pytest.mark.parametrize(
    ("wrong", "broken"),
    [
        pytest.param([*RIGHT, (3, 4, 0, 0, 3, 3)], {"P1", "P2", "P3", "P4"}, id="empty-chunk"),
        pytest.param([RIGHT[0]], {"P2"}, id="request-lost"),
        pytest.param([RIGHT[0], SECOND, SECOND], {"P2"}, id="request-twice"),
        pytest.param([SECOND, RIGHT[0]], {"P2"}, id="descending"),
        pytest.param([RIGHT[0], (3, 5, 0, 6, 3, 9)], {"P3", "P6"}, id="zero-first"),
        pytest.param([(0, 4, 0, 2, 0, 3), SECOND], {"P4", "P6"}, id="zero-last"),
        pytest.param([(0, 3, 0, 1, 0, 3), SECOND], {"P6", "maxima"}, id="too-narrow"),
        pytest.param([RIGHT[0], (4, 5, 0, 7, 3, 9)], {"maxima"}, id="too-wide"),
        pytest.param([(0, 1, 0, 2, 0, 2), (2, 3, 0, 1, 2, 3), SECOND], {"P7"}, id="split"),
        pytest.param([RIGHT[0], (4, 5, 0, 6, 4, 9)], {"range"}, id="token-dropped"),
    ],
)
def test_the_checker_names_what_a_wrong_plan_breaks(wrong, broken):
    assert violations(TOKENS, wrong) == broken


def test_the_checker_refuses_a_chunk_that_ignores_a_longer_waiting_request():
    batch = Batch([1, 8, 1], [1, 0, 1], 2, 1, 8, 10, 1)
    assert violations(batch, [(0, 3, 4, 5, 0, 2)]) == set()
    assert violations(batch, [(0, 3, 0, 1, 0, 2)]) == {"P6", "maxima"}


def test_the_engines_rule_plans_empty_chunks_where_zeros_are():
    batch = Batch([40, 40, 16, 64, 0], [0, 5, 0, 3, 0], 4, 8, 64, 16, 1)
    shipped = plan_of_nonempty_requests(batch)
    assert shipped == [
        (0, 1, 10, 17, 0, 0),
        (1, 2, 10, 22, 0, 5),
        (2, 3, 4, 11, 5, 5),
        (3, 4, 16, 26, 5, 8),
        (4, 5, 0, 0, 8, 8),
    ]
    assert {"P1", "P3", "P4"} <= violations(batch, shipped)
