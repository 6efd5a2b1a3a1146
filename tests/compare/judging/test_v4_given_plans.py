"""Plans that a case of v4-prefill prescribes: what keeps to them, and what else is told."""

from __future__ import annotations

import dataclasses

import pytest

from compare.protocol.verdict import Status
from compare.suites.v4_prefill.judge import evidence_of, judge
from compare.suites.v4_prefill.plan import MEANINGS, NAMES, right_plan
from compare.suites.v4_prefill.torch_adapter import TorchV4Prefill
from tests.compare.judging.test_v4_judge import inputs_of, names, verdict_of, with_plan


@pytest.mark.parametrize("plan", ["alone", "vllm-0.33.0"])
def test_the_plan_that_a_case_asks_for_is_right_and_so_is_the_fixed_one(plan):
    # Under the shipped rules the waiting request in front is a chunk of its own.
    inputs = inputs_of(
        "v4-prefill:seq=300+40+60,q=0+4+6,h=2,topk=12,window=24,max_len=300,max_tokens=16,chunk=1,"
        f"plan={plan},seed=8302"
    )
    asked = inputs.prescribed_plan
    assert asked is not None
    fixed = right_plan(dataclasses.replace(inputs, plan_rules="fixed"))
    assert asked != fixed
    evidence = evidence_of(inputs)
    found = TorchV4Prefill("torch").run(inputs)
    assert found.plan == asked
    assert verdict_of(evidence, found).status is Status.PASS
    own = TorchV4Prefill("torch").run(dataclasses.replace(inputs, plan_rules="fixed"))
    assert own.plan == fixed
    assert verdict_of(evidence, own).status is Status.PASS
    other = evidence_of(dataclasses.replace(inputs, plan_rules="fixed"))
    assert verdict_of(other, found).status is Status.PLAN


@pytest.mark.parametrize(
    ("plan", "more", "name", "words"),
    [
        ("alone", {"workspace_rows": -1}, "workspace-size", "P6: chunk 0 (request 1) has 26 win"),
        ("alone", {"compressed_rows": -1}, "workspace-size", "P6: chunk 0 (request 1) has 9 comp"),
        (
            "alone",
            {"workspace_rows": 1},
            "not-the-given-plan",
            "chunk 0 has the requests [1, 2), N = 10 and M = 38; the case prescribes [1, 2), "
            "N = 10 and M = 37",
        ),
        (
            "vllm-0.33.0",
            {"workspace_rows": 1},
            "not-the-given-plan",
            "chunk 0 has the requests [0, 1), N = 75 and M = 99; the case prescribes [0, 1), "
            "N = 75 and M = 98",
        ),
    ],
)
def test_the_split_that_a_case_prescribes_is_no_fault_of_a_wrong_plan(plan, more, name, words):
    inputs = inputs_of(
        "v4-prefill:seq=300+40+60,q=0+4+6,h=2,topk=12,window=24,max_len=300,max_tokens=16,chunk=1,"
        f"plan={plan},seed=8302"
    )
    verdict = judge(inputs, with_plan(TorchV4Prefill("torch").run(inputs), **more))
    assert (verdict.status, names(verdict)) == (Status.PLAN, [name])
    assert verdict.reason.startswith(f"plan: {words}")
    assert "P7" not in verdict.reason
    assert "P1" not in verdict.reason


def test_a_chunk_that_lacks_is_told_where_the_others_are_the_prescribed_ones():
    inputs = inputs_of(
        "v4-prefill:seq=30+40+60,q=0+4+0,h=2,topk=4,window=8,max_len=60,max_tokens=4,chunk=1,"
        "plan=vllm-0.33.0,seed=8305"
    )
    given = inputs.prescribed_plan
    assert given is not None
    assert [(chunk.start, chunk.end) for chunk in given] == [(0, 1), (1, 2), (2, 3)]
    found = TorchV4Prefill("torch").run(inputs)
    verdict = judge(inputs, dataclasses.replace(found, plan=given[:2], stages=None))
    assert (verdict.status, names(verdict)) == (Status.PLAN, ["not-the-given-plan"])
    assert verdict.reason == "plan: the plan has 2 chunks; the case prescribes 3"


def test_another_split_than_the_prescribed_one_is_a_wrong_plan():
    """One alone, two together: neither as the case wants it nor all three, which fit."""
    case = "v4-prefill:seq=40+60+50,q=4+6+5,h=2,topk=12,window=24,seed=8304"
    inputs = inputs_of(f"{case},plan=alone")
    found = TorchV4Prefill("torch").run(inputs)
    assert found.plan is not None
    first, second, third = found.plan
    both = dataclasses.replace(second, end=third.end, query_end=third.query_end)
    verdict = judge(inputs, dataclasses.replace(found, plan=(first, both), stages=None))
    assert (verdict.status, names(verdict)) == (Status.PLAN, ["not-the-given-plan"])
    assert "chunk 1 has the requests [1, 3), " in verdict.reason
    split = dataclasses.replace(found, stages=None)
    fixed = judge(inputs_of(f"{case},plan=fixed"), split)
    assert names(fixed) == ["needless-split"]
    assert fixed.diagnosis[0].sentence == (
        "plan: P7: a chunk ends though the next request with query tokens fits and none without "
        "lies between"
    )


def test_every_rule_of_a_plan_has_its_name_and_its_meaning():
    assert MEANINGS.keys() == NAMES.keys()
