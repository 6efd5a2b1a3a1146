"""Decode plans: every rule by a plan that breaks it, the shipped views in words, and names."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.generate.ownership import local_length
from compare.judging.decode_plan_rules import right_plan
from compare.judging.plans import DecodePlanInputs, DecodePlanResult
from compare.protocol.verdict import Status
from compare.suites.decode_plan import judge as decode_plan
from torch_ref.planning import decode_rows, local_key_counts, local_seq_lens


def batch(lens, q, *, max_q=None, world=2, rank=0, interleave=1, causal=True, padding=0):
    return DecodePlanInputs(
        query_start_loc=(0, *accumulate(q)),
        total_lens=tuple(lens),
        max_query_len=max_q or max((1, *q)),
        causal=causal,
        num_rows=sum(q) + padding,
        dcp_rank=rank,
        dcp_world=world,
        interleave=interleave,
    )


def right(inputs: DecodePlanInputs) -> DecodePlanResult:
    due = right_plan(inputs)
    return DecodePlanResult(
        ragged=due.ragged,
        request=tuple(-1 if i is None else i for i in due.request),
        bound=due.bound,
        local_counts=due.counts,
        padding=due.padding,
    )


def planned(inputs: DecodePlanInputs, rules: str = "fixed") -> DecodePlanResult:
    """The reference planner's, which this judge doesn't use."""
    rows = decode_rows(
        inputs.query_start_loc,
        inputs.total_lens,
        max_query_len=inputs.max_query_len,
        causal=inputs.causal,
        num_rows=inputs.num_rows,
        rules=rules,
    )
    shard = {
        "dcp_rank": inputs.dcp_rank,
        "dcp_world": inputs.dcp_world,
        "interleave": inputs.interleave,
    }
    lens = local_seq_lens(inputs.total_lens, **shard)
    return DecodePlanResult(
        ragged=rows.ragged,
        request=rows.request,
        bound=rows.bound,
        local_counts=local_key_counts(rows, lens, **shard),
        padding=rows.padding,
    )


def said(inputs: DecodePlanInputs, plan: DecodePlanResult) -> list[str]:
    return decode_plan.explain(inputs, plan)


def test_the_rows_of_6_2_1_have_the_bounds_of_their_tokens():
    due = right_plan(batch([20, 9, 4], [6, 2, 1]))
    assert due.request == (0, 0, 0, 0, 0, 0, 1, 1, 2)
    assert due.bound == (15, 16, 17, 18, 19, 20, 8, 9, 4)
    assert due.counts == (8, 8, 9, 9, 10, 10, 4, 5, 2)
    assert due.ragged


@pytest.mark.parametrize("interleave", [1, 2, 4, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_owned_positions_are_counted_as_by_listing_them(world, interleave):
    for bound in (-3, 0, 1, world, world + 1, 63, 64, 65, 64 * world, 64 * world + 1, 517):
        listed = [sum(g // interleave % world == r for g in range(bound)) for r in range(world)]
        counted = [local_length(bound, r, world, interleave) for r in range(world)]
        assert counted == listed
        assert sum(counted) == max(bound, 0)


@pytest.mark.parametrize(
    ("q", "max_q", "padding", "ragged"),
    [
        ([8, 8], 8, 0, False),
        ([8, 2], 8, 0, True),
        ([8, 2], 8, 6, True),
        ([8, 0, 8], 8, 8, True),
        ([8, 8, 0], 8, 0, False),
        ([1, 1], 8, 0, True),
        ([1, 1], 1, 0, False),
        ([0, 0], 1, 0, False),
        ([], 1, 0, False),
    ],
)
def test_a_batch_is_uniform_only_if_each_request_owns_its_own_rows(q, max_q, padding, ragged):
    inputs = batch([40] * len(q), q, max_q=max_q, padding=padding)
    assert right_plan(inputs).ragged is ragged
    wrong = dataclasses.replace(right(inputs), ragged=not ragged)
    verdict = decode_plan.judge(inputs, wrong)
    assert verdict.status is Status.PLAN
    assert [found.name for found in verdict.diagnosis] == ["ragged-flag"]


def test_8_and_2_viewed_as_5_and_5_is_told_row_by_row():
    inputs = batch([301, 97], [8, 2])
    verdict = decode_plan.judge(inputs, planned(inputs, "vllm-0.33.0"))
    assert verdict.status is Status.PLAN
    assert [found.name for found in verdict.diagnosis] == ["viewed-as-uniform"]
    assert said(inputs, planned(inputs, "vllm-0.33.0")) == [
        "8+2 is viewed as 5+5",
        "the batch 8+2 is called uniform; as [requests, 8] its rows would go to other requests, "
        "or to none",
        "rows 0 to 4 of request 0 have bounds 297, 298, 299, 300, 301; due: bounds 294, 295, 296, "
        "297, 298",
        "rows 5 to 7 of request 0 use block table and length of request 1, with bounds 93, 94, 95; "
        "due: request 0 with bounds 299, 300, 301",
    ]


def test_padding_that_fools_a_count_is_named():
    inputs = batch([301, 97], [8, 2], padding=6)
    counted = dataclasses.replace(right(inputs), ragged=False)
    assert said(inputs, counted) == [
        "the batch 8+2 is called uniform; as [requests, 8] its rows would go to other requests, "
        "or to none (16 rows are 2 x 8, but counting isn't enough)"
    ]
    shipped = said(inputs, planned(inputs, "vllm-0.33.0"))
    assert shipped[0] == "8+2 and 6 rows of padding is viewed as 8+8"
    # B's rows lie at j = 0, 1 of 8.
    assert shipped[-1] == "rows 8 to 9 of request 1 have bounds 90, 91; due: bounds 96, 97"


def test_two_bounds_for_nine_rows():
    inputs = batch([301, 97], [8, 1])
    short = dataclasses.replace(right(inputs), bound=(301, 97))
    verdict = decode_plan.judge(inputs, short)
    assert verdict.reason == "2 bounds for 9 rows"
    assert [found.name for found in verdict.diagnosis] == ["row-count"]


@pytest.mark.parametrize("what", ["request", "local_counts", "padding"])
def test_every_column_has_one_entry_per_row(what):
    inputs = batch([301, 97], [8, 1])
    plan = right(inputs)
    longer = dataclasses.replace(plan, **{what: (*getattr(plan, what), 0)})
    assert said(inputs, longer)[0].startswith("10 ")


def test_padded_rows_see_nothing_and_are_called_padding():
    inputs = batch([9], [2], padding=2)
    plan = right(inputs)
    seeing = dataclasses.replace(plan, local_counts=(*plan.local_counts[:2], 5, 5))
    assert said(inputs, seeing) == ["rows 2 to 3, padding, have key count 5; they see nothing"]
    called = dataclasses.replace(plan, padding=(False, True, False, False))
    assert said(inputs, called) == [
        "row 1: a request's, called padding",
        "rows 2 to 3: padding, called a request's",
    ]


def test_what_padded_rows_name_as_request_and_bound_is_free():
    inputs = batch([9], [2], padding=2)
    plan = right(inputs)
    other = dataclasses.replace(
        plan, request=(*plan.request[:2], 0, 7), bound=(*plan.bound[:2], 10, 11)
    )
    assert decode_plan.judge(inputs, other).status is Status.PASS


def test_rows_of_a_draft_block_see_all_of_their_request():
    inputs = batch([17], [3], causal=False)
    assert right_plan(inputs).bound == (17, 17, 17)


def faulty(name: str, inputs: DecodePlanInputs) -> DecodePlanResult:
    plan, due = right(inputs), right_plan(inputs)

    def counted(bounds, rank=inputs.dcp_rank, interleave=inputs.interleave):
        return tuple(
            0 if pad else local_length(b, rank, inputs.dcp_world, interleave)
            for b, pad in zip(bounds, due.padding, strict=True)
        )

    if name == "all-rows-at-total":
        bound = tuple(0 if i is None else inputs.total_lens[i] for i in due.request)
        return dataclasses.replace(plan, bound=bound, local_counts=counted(bound))
    if name == "bound-off-by-one":
        bound = tuple(b + (not pad) for b, pad in zip(due.bound, due.padding, strict=True))
        return dataclasses.replace(plan, bound=bound, local_counts=counted(bound))
    if name == "localised-before-expanding":
        totals = [0 if i is None else inputs.total_lens[i] for i in due.request]
        local = counted(totals)
        counts = tuple(
            max(n - (total - b), 0) if not pad else 0
            for n, total, b, pad in zip(local, totals, due.bound, due.padding, strict=True)
        )
        return dataclasses.replace(plan, local_counts=counts)
    if name == "interleave-ignored":
        return dataclasses.replace(plan, local_counts=counted(due.bound, interleave=1))
    assert name == "wrong-rank-mask"
    return dataclasses.replace(plan, local_counts=counted(due.bound, rank=1 - inputs.dcp_rank))


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    "name",
    [
        "all-rows-at-total",
        "bound-off-by-one",
        "localised-before-expanding",
        "interleave-ignored",
        "wrong-rank-mask",
    ],
)
def test_a_known_fault_has_its_own_name(name, padding):
    inputs = batch([301, 98, 17], [8, 3, 2], interleave=4, padding=padding)
    verdict = decode_plan.judge(inputs, faulty(name, inputs))
    assert verdict.status is Status.PLAN
    assert [found.name for found in verdict.diagnosis] == [name]


def test_one_wrong_row_is_found_and_named_by_its_rule():
    inputs = batch([301, 97], [8, 2])
    plan = right(inputs)
    bound = (*plan.bound[:3], plan.bound[3] + 2, *plan.bound[4:])
    verdict = decode_plan.judge(inputs, dataclasses.replace(plan, bound=bound))
    assert "row 3 of request 0 have bound 299; due: bound 297" in verdict.reason
    assert [found.name for found in verdict.diagnosis] == ["wrong-bound"]


def test_a_shipped_reference_is_no_failed_reference():
    inputs = batch([301, 97], [8, 2])
    verdict = decode_plan.judge(inputs, right(inputs), planned(inputs, "vllm-0.33.0"))
    assert verdict.status is Status.PASS
    assert verdict.reference_failed is None
    assert verdict.notes == (
        "candidate and reference differ in 8 rows: 0, 1, 2, 3, 4, 5, 6, 7",
        "the reference follows the shipped rules: 8+2 is viewed as 5+5",
    )


def test_any_other_wrong_reference_failed():
    inputs = batch([301, 97], [8, 2])
    verdict = decode_plan.judge(inputs, right(inputs), faulty("all-rows-at-total", inputs))
    assert verdict.status is Status.PASS
    assert verdict.reference_failed is not None
    assert verdict.reference_failed.startswith("rows 0 to 6 of request 0 have bound 301")


def test_an_unknown_profile_is_refused():
    inputs = batch([5], [1])
    with pytest.raises(ValueError, match="profile: 'loose'"):
        decode_plan.judge(inputs, right(inputs), profile="loose")


@st.composite
def batches(draw) -> DecodePlanInputs:
    q = draw(st.lists(st.integers(0, 6), max_size=5))
    lens = [draw(st.integers(0, 90)) for _ in q]
    world = draw(st.integers(1, 4))
    return batch(
        lens,
        q,
        max_q=max((1, *q)) + draw(st.integers(0, 2)),
        world=world,
        rank=draw(st.integers(0, world - 1)),
        interleave=draw(st.sampled_from([1, 2, 4])),
        causal=draw(st.booleans()),
        padding=draw(st.integers(0, 4)),
    )


@given(batches())
def test_the_reference_planner_is_right_by_these_rules(inputs):
    assert said(inputs, planned(inputs)) == []


@given(batches(), st.data())
def test_no_changed_entry_of_a_real_row_passes(inputs, data):
    real = inputs.query_start_loc[-1]
    if not real:
        return
    row = data.draw(st.integers(0, real - 1))
    what = data.draw(st.sampled_from(["request", "bound", "local_counts"]))
    step = data.draw(st.sampled_from([-1, 1]))
    plan = right(inputs)
    values = np.array(getattr(plan, what))
    values[row] += step
    changed = dataclasses.replace(plan, **{what: tuple(values.tolist())})
    assert decode_plan.judge(inputs, changed).status is Status.PLAN
