"""Plans are judged by P1 to P7 and nothing else."""

from __future__ import annotations

import dataclasses
import random

import pytest

from compare.judging.plan_rules import fixed_plan, shipped_plan, sizes, violations
from compare.judging.plans import PlanChunk, PlanResult, PrefillPlanInputs
from compare.protocol.verdict import Status
from compare.run.registry import in_process
from compare.suites.prefill_plan.judge import explain, judge

# cases.md 1: the batch on which engines have died. Budget 1 * (16 + 8 + 16) = 40 rows.
BATCH = PrefillPlanInputs(
    seq_lens=(40, 40, 16, 64, 0),
    query_lens=(0, 5, 0, 3, 0),
    compress_ratio=4,
    window=8,
    max_model_len=64,
    max_num_batched_tokens=16,
    chunk_size=1,
)


def chunk_of(start: int, end: int, N: int, M: int, query_start: int, query_end: int) -> PlanChunk:
    return PlanChunk(
        start=start,
        end=end,
        compressed_rows=N,
        workspace_rows=M,
        query_start=query_start,
        query_end=query_end,
    )


RIGHT = (
    chunk_of(1, 2, 10, 22, 0, 5),
    chunk_of(3, 4, 16, 26, 5, 8),
)
# Room for several: comp 10 10 4 16, gather 5+7 each of the nonzero, limit 4 * 40.
ROOMY = dataclasses.replace(BATCH, seq_lens=(40, 40, 16, 64), query_lens=(5, 0, 5, 5), chunk_size=4)
V1 = (chunk_of(0, 4, 16, 28, 0, 15),)
V2 = (
    chunk_of(0, 1, 10, 22, 0, 5),
    chunk_of(2, 4, 16, 28, 5, 15),
)


def rules_broken(inputs: PrefillPlanInputs, *chunks: PlanChunk) -> list[str]:
    verdict = judge(inputs, PlanResult(chunks=chunks))
    assert verdict.status is (Status.PLAN if verdict.reason else Status.PASS)
    return [found.name for found in verdict.diagnosis]


def changed(chunk: PlanChunk, **fields: int) -> PlanChunk:
    return dataclasses.replace(chunk, **fields)


def test_sizes_of_the_batch_are_those_of_the_rule():
    known = sizes(BATCH)
    assert known.compressed == (10, 10, 4, 16, 0)
    assert known.gather == (7, 12, 7, 10, 0)
    assert known.limit == 40


def test_the_right_plan_of_the_batch_passes():
    assert rules_broken(BATCH, *RIGHT) == []


@pytest.mark.parametrize("plan", [V1, V2])
def test_a_zero_query_request_may_stay_inside_a_chunk_or_end_it(plan):
    assert rules_broken(ROOMY, *plan) == []


def test_no_query_token_at_all_means_no_chunk():
    idle = dataclasses.replace(BATCH, query_lens=(0,) * 5)
    assert rules_broken(idle) == []
    assert "empty-chunk" in rules_broken(idle, *shipped_plan(idle))


def test_the_shipped_plan_is_explained_chunk_by_chunk():
    said = explain(BATCH, PlanResult(chunks=shipped_plan(BATCH)))
    assert [line for line in said if "FlashMLA aborts" in line] == [
        "P1: chunk 0 (request 0) has no query token, its range is [0, 0): "
        "FlashMLA aborts on it, s_q = 0",
        "P1: chunk 2 (request 2) has no query token, its range is [5, 5): "
        "FlashMLA aborts on it, s_q = 0",
        "P1: chunk 4 (request 4) has no query token, its range is [8, 8): "
        "FlashMLA aborts on it, s_q = 0",
    ]
    assert rules_broken(BATCH, *shipped_plan(BATCH)) == ["empty-chunk", "trailing-chunk"]


def test_a_request_without_a_chunk_is_missed():
    assert rules_broken(BATCH, RIGHT[0]) == ["request-coverage"]


def test_a_request_in_two_chunks_is_seen():
    assert "request-coverage" in rules_broken(BATCH, RIGHT[0], RIGHT[0], RIGHT[1])


def test_chunks_out_of_order_are_seen():
    assert "request-coverage" in rules_broken(BATCH, RIGHT[1], RIGHT[0])


def test_a_chunk_may_not_begin_with_a_zero_query_request():
    first = changed(V2[1], start=1)
    assert rules_broken(ROOMY, V2[0], first) == ["zero-query-first"]


def test_a_kept_zero_query_request_must_find_room_for_its_rows():
    longest = dataclasses.replace(ROOMY, seq_lens=(40, 100, 16, 64), max_model_len=128)
    assert rules_broken(longest, *V1) == ["workspace-size"]  # comp 25 in N = 16 rows
    assert rules_broken(longest, *V2) == []


def test_a_chunk_over_the_area_is_seen():
    tight = dataclasses.replace(ROOMY, chunk_size=2)  # 80 rows; 4 * 28 are taken
    assert rules_broken(tight, *V1) == ["workspace-size"]


def test_a_single_request_over_the_area_is_allowed():
    huge = dataclasses.replace(BATCH, seq_lens=(400,), query_lens=(5,))
    assert rules_broken(huge, *shipped_plan(huge)) == []


def test_a_single_request_may_not_take_more_than_the_workspace_has():
    first, second = RIGHT
    assert rules_broken(BATCH, changed(first, workspace_rows=40), second) == []
    assert rules_broken(BATCH, changed(first, workspace_rows=41), second) == ["workspace-size"]


def test_a_needless_split_is_seen_without_and_with_zeros_elsewhere():
    queries = (5, 5, 5, 0)
    batch = dataclasses.replace(ROOMY, query_lens=queries)
    one_each = (
        PlanChunk(
            start=0, end=1, compressed_rows=10, workspace_rows=22, query_start=0, query_end=5
        ),
        PlanChunk(
            start=1, end=2, compressed_rows=10, workspace_rows=22, query_start=5, query_end=10
        ),
        PlanChunk(
            start=2, end=3, compressed_rows=4, workspace_rows=16, query_start=10, query_end=15
        ),
    )
    assert rules_broken(batch, *one_each) == ["needless-split"]


def test_without_zeros_the_shipped_plan_is_the_only_right_one():
    batch = dataclasses.replace(ROOMY, query_lens=(5, 5, 5, 5))
    (chunk,) = shipped_plan(batch)
    assert rules_broken(batch, chunk) == []
    wider = changed(chunk, workspace_rows=chunk.workspace_rows + 1)
    assert rules_broken(batch, wider) == ["not-the-shipped-plan"]


@pytest.mark.parametrize(
    "chunk",
    [
        changed(RIGHT[0], end=1),
        changed(RIGHT[0], end=9),
        changed(RIGHT[0], start=-1),
        changed(RIGHT[0], query_end=6),
    ],
)
def test_a_chunk_that_is_no_range_of_the_batch_is_named(chunk: PlanChunk):
    assert rules_broken(BATCH, chunk, RIGHT[1]) == ["chunk-range"]


def test_a_shipped_reference_with_empty_chunks_is_no_failed_reference():
    shipped = PlanResult(chunks=shipped_plan(BATCH))
    verdict = judge(BATCH, PlanResult(chunks=RIGHT), shipped)
    assert verdict.status is Status.PASS
    assert verdict.reference_failed is None
    assert any("chunk 0, 2, 4" in note for note in verdict.notes)


def test_any_other_wrong_reference_is_named():
    verdict = judge(BATCH, PlanResult(chunks=RIGHT), PlanResult(chunks=RIGHT[:1]))
    assert verdict.status is Status.PASS
    assert verdict.reference_failed == "P2: no chunk has request 3 with 3 query tokens"


def test_a_single_chunk_of_the_reference_is_counted_as_one():
    shipped = PlanResult(chunks=shipped_plan(BATCH))
    batch = dataclasses.replace(BATCH, seq_lens=(40, 40), query_lens=(0, 5))
    one = PlanResult(chunks=(chunk_of(1, 2, 10, 22, 0, 5),))
    assert not judge(batch, one).reason
    two = PlanResult(chunks=(*one.chunks, *one.chunks))
    assert "the reference has 1 chunk [1, 2), the candidate 2 [1, 2) [1, 2)" in (
        judge(batch, two, one).notes
    )
    assert f"the reference has {len(shipped.chunks)} chunks " in " ".join(
        judge(BATCH, PlanResult(chunks=RIGHT), shipped).notes
    )


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="profile: 'strict'"):
        judge(BATCH, PlanResult(chunks=RIGHT), profile="strict")


@pytest.mark.parametrize("seed", range(40))
def test_the_rules_own_fixed_plan_is_that_of_both_planners(seed: int) -> None:
    """The judge builds its plan from the rules; neither planner is asked, and both agree."""
    rng = random.Random(seed)
    lengths = [rng.randrange(0, 300) for _ in range(rng.randrange(0, 12))]
    batch = PrefillPlanInputs(
        seq_lens=tuple(lengths),
        query_lens=tuple(rng.choice((0, min(n, 1), n // 2, n)) for n in lengths),
        compress_ratio=rng.choice((1, 4, 128)),
        window=rng.choice((1, 8, 128)),
        max_model_len=300,
        max_num_batched_tokens=rng.choice((300, 1000)),
        chunk_size=rng.choice((1, 2, 4)),
    )
    plan = fixed_plan(batch)
    assert not violations(batch, plan)
    for name in ("jax-planner", "torch-planner"):
        assert in_process(name).run(batch) == PlanResult(chunks=plan)
