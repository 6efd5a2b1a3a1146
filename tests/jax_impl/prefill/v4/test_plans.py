"""Requests and chunks: no bit depends on what else is in the batch, or on how it is cut."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl.planning import PrefillChunk, compressed_lens
from tests.jax_impl.prefill.index_lists import Batch
from tests.jax_impl.prefill.problems import assert_same_bits
from tests.jax_impl.prefill.reference import assert_agrees
from tests.jax_impl.prefill.v4.batches import Problem, numpy_of, problem
from tests.jax_impl.prefill.v4.test_prefill import assert_same, mixed, mixed_result, statistics

# Requests 1, 2 and 4 of `mixed` have tokens, request 3 between them has none.
REQUESTS = (1, 2, 4)
PLANS = {
    "V1: the request without tokens stays": [(1, 5)],
    "V2: it ends a chunk": [(1, 3), (4, 5)],
    "one request a chunk": [(1, 2), (2, 3), (4, 5)],
    "cut late": [(1, 2), (2, 5)],
    "requests without tokens at both ends": [(0, 3), (3, 6)],
}


def chunks(batch: Batch, ranges: list[tuple[int, int]], *, spare: int = 0) -> list[PrefillChunk]:
    """Chunks of the least N and M, or with some rows to spare in both."""
    compressed = compressed_lens(batch.seq_lens, compress_ratio=batch.ratio)
    offsets = [int(x) for x in batch.query_start_loc - batch.query_start_loc[0]]
    made = []
    for start, end in ranges:
        n = max(compressed[start:end]) + spare
        m = n + int(batch.gather_lens[start:end].max()) + spare
        made.append(PrefillChunk(start, end, n, m, offsets[start], offsets[end]))
    return made


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("name", PLANS)
def test_every_legal_plan_gives_the_same_bits(name, spare):
    plan = chunks(mixed().batch, PLANS[name], spare=spare)
    result = mixed().run(plan=plan)
    assert result.plan == tuple(plan)
    assert_same(result, mixed_result())


@pytest.mark.parametrize("request_number", REQUESTS)
def test_a_request_alone_gives_the_bits_that_it_gives_in_the_batch(request_number):
    alone = mixed().run(**mixed().alone(request_number))
    offsets = mixed().batch.query_start_loc - mixed().batch.query_start_loc[0]
    tokens = slice(offsets[request_number], offsets[request_number + 1])
    mine = jax.tree.map(lambda x: x[tokens], statistics(mixed_result()))
    assert_same_bits(numpy_of(statistics(alone)), mine)


@pytest.mark.parametrize("name", [None, *PLANS])
def test_fused_gives_the_bits_of_gathering_first(name):
    """One launch for all requests without a plan; with one, a launch for each chunk."""
    batch = mixed("v4-fp8")
    plan = None if name is None else chunks(batch.batch, PLANS[name])
    result = batch.run(fused=True, plan=plan)
    assert result.plan == (None if plan is None else tuple(plan))
    assert result.stages is None
    assert_same(result, mixed_result("v4-fp8"))


@functools.cache
def tiny() -> Problem:
    """Of everything a little: without tokens, short, far beyond the window, over a page's end."""
    return problem([20, 3, 30, 9, 18], [0, 2, 1, 0, 3], kv_format="v4-fp8", page_size=16, topk=3)


@pytest.mark.parametrize("kv_format", ["v4-fp8", "bf16"])
def test_the_kernels_give_the_same_bits_under_every_plan_and_fused(kv_format):
    """The Pallas kernels of all stages, under the interpreter."""
    batch = tiny() if kv_format == "v4-fp8" else problem(
        [20, 3, 30, 9, 18], [0, 2, 1, 0, 3], kv_format="bf16", topk=3, heads=1
    )  # fmt: skip
    backend = "pallas-interpret"
    whole = numpy_of(batch.run(backend))
    assert [(c.start, c.end) for c in whole.plan] == [(1, 5)]
    assert_agrees(whole, batch.expected())
    cut = chunks(batch.batch, [(1, 3), (4, 5)])
    assert_same(batch.run(backend, plan=cut), whole)
    if kv_format == "v4-fp8":
        assert_same(batch.run(backend, fused=True), whole)


def replaced(number: int, **changes: Any) -> list[PrefillChunk]:
    plan = chunks(mixed().batch, [(1, 3), (4, 5)])
    plan[number] = dataclasses.replace(plan[number], **changes)
    return plan


ILLEGAL = [
    ([], r"P2: request 1 has 3 query tokens and is in no chunk"),
    (chunks(mixed().batch, [(1, 3)]), r"P2: request 4 has 9 query tokens"),
    (chunks(mixed().batch, [(2, 5)]), r"P2: request 1 has 3 query tokens"),
    (chunks(mixed().batch, [(1, 5), (4, 5)]), r"chunk 1, .*P2: .* requests from 5 on are left"),
    (chunks(mixed().batch, [(4, 5), (1, 3)]), r"P2: request 1 has 3"),
    (replaced(0, end=1), r"chunk 0, .*P2"),
    (replaced(1, end=7), r"chunk 1, .*P2: .*of the 6 requests"),
    (replaced(0, start=-1), r"chunk 0, .*P2"),
    (chunks(mixed().batch, [(0, 1), (1, 5)]), r"chunk 0, .*P1: it has no query token"),
    (replaced(0, query_end=9), r"chunk 0, .*P2: its requests have the query tokens \(0, 8\)"),
    (replaced(1, query_start=0), r"chunk 1, .*P2: its requests have the query tokens \(8, 17\)"),
    (replaced(0, compressed_rows=74), r"chunk 0, .*P6: request 2 needs 75 compressed and 12"),
    (replaced(0, workspace_rows=86), r"chunk 0, .*P6: request 2 needs 75 compressed and 12"),
    (replaced(0, workspace_rows=500), r"chunk 0, .*P6: it takes 1000 of 960 workspace rows"),
    (replaced(1, workspace_rows=961), r"max_model_len.*request 4 alone takes 961.*960"),
    ([(1, 5, 75, 91)], r"plan must be a sequence of jax_impl.planning.PrefillChunk"),
    (3, r"plan must be a sequence .*; got 3"),
    (replaced(0, compressed_rows=75.0), r"plan must have .*got 75.0 as compressed_rows of chunk 0"),
    (replaced(1, workspace_rows="91"), r"plan must have whole numbers.*got '91' as workspace_rows"),
    (replaced(1, query_end=None), r"plan must have whole numbers.*got None as query_end"),
    (replaced(0, start=True), r"plan must have whole numbers.*got True as start of chunk 0"),
]


def test_a_plan_of_numpy_integers_is_one_of_integers():
    plan = chunks(mixed().batch, [(1, 5)])
    fields = dataclasses.asdict(plan[0])
    result = mixed().run(plan=[PrefillChunk(**{k: np.int64(v) for k, v in fields.items()})])
    assert result.plan == tuple(plan)
    assert all(type(value) is int for value in dataclasses.asdict(result.plan[0]).values())


@pytest.mark.parametrize(("plan", "message"), ILLEGAL)
def test_a_plan_that_is_not_legal_is_refused_by_the_invariant_that_it_breaks(plan, message):
    with pytest.raises(ValueError, match=message):
        mixed().run(plan=plan)


def test_a_request_without_tokens_between_others_has_to_fit_its_chunk():
    """P6: it is gathered too, and would else spill over the next request's rows."""
    batch = problem([8, 200, 8], [1, 0, 1])
    legal = chunks(batch.batch, [(0, 3)])[0]
    assert (legal.compressed_rows, legal.workspace_rows) == (50, 58)
    narrow = dataclasses.replace(legal, compressed_rows=2, workspace_rows=10)
    with pytest.raises(ValueError, match=r"P6: request 1 needs 50 compressed and 7 window"):
        batch.run(plan=[narrow])


def test_a_request_too_large_for_the_planned_workspace_is_refused():
    """Such a request is larger than the engine's own limits; its chunk would be, too."""
    engine: dict[str, Any] = {"max_model_len": 40, "max_num_batched_tokens": 8, "chunk_size": 1}
    batch = problem([300, 8], [3, 1], **engine)
    with pytest.raises(
        ValueError,
        match=r"request 0 alone takes 85 workspace rows, and 26 are planned for max_model_len 40",
    ):
        batch.run()
    fused = problem([300, 8], [3, 1], kv_format="v4-fp8", **engine)
    assert_agrees(fused.run(fused=True), fused.expected())


def test_bits_do_not_depend_on_stale_pages():
    """Whatever no token of the batch lies on, spare pages included, is NaN in `problem`."""
    cache = mixed().arguments["swa"].cache
    assert np.isnan(np.asarray(cache, np.float32)).any()
    assert np.isfinite(np.asarray(mixed_result().out, np.float32)).all()
