from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compare.goldens.format import DamagedGolden
from compare.judging.attention_call import SparsePrefillResult
from compare.judging.plans import PlanResult, PrefillPlanInputs
from compare.protocol.case import Case
from compare.protocol.implementation import UnknownImplementation, Unsupported
from compare.protocol.inputs import Inputs, Result
from compare.protocol.report import Report
from compare.protocol.verdict import Status
from compare.report import summary
from compare.run import registry, session
from compare.run.repeats import difference, run_repeatedly
from compare.run.runner import run
from compare.run.tasks import Options
from compare.suites.table import SUITES, default_cases, make_inputs, parse_case

BATCHES = [
    parse_case(f"prefill-plan:seq={a}+40,q=5+{b},window=8,max_len=64,max_tokens=16,chunk=1")
    for a, b in itertools.product((16, 24), (0, 3))
]
PREFILL = parse_case("sparse-prefill:s_q=2,s_kv=40,h=4,sink=mixed")


class Planner:
    """The right plan, or what `act` does instead."""

    suites = frozenset({"prefill-plan"})

    def __init__(
        self, name: str = "fake", act: Callable[[PrefillPlanInputs], Any] | None = None
    ) -> None:
        self.name = name
        self.ran: list[str] = []
        self.act = act

    def supports(self, case: Case) -> str | None:
        return None

    def run(self, inputs: Inputs) -> Result:
        assert isinstance(inputs, PrefillPlanInputs)
        self.ran.append(str(inputs.case))
        right = registry.find("jax-planner").run(inputs)
        return right if self.act is None else self.act(inputs) or right


def raising(error: BaseException) -> Callable[[Any], Any]:
    def act(_: Any) -> Any:
        raise error

    return act


def statuses(report: Report) -> list[tuple[str, str]]:
    return [(row.candidate, row.verdict.status.name) for row in report.rows]


def test_right_and_wrong_candidates_are_told_apart_and_rows_keep_their_order() -> None:
    wrong = Planner("wrong", lambda _: PlanResult(chunks=()))
    report = run(BATCHES[:2], [wrong, "jax-planner"], "oracle")
    assert [row.case for row in report.rows] == [str(c) for c in BATCHES[:2] for _ in range(2)]
    assert [row.candidate for row in report.rows] == ["wrong", "jax-planner"] * 2
    assert [row.verdict.status is Status.PASS for row in report.rows] == [False, True] * 2
    assert all(row.reference is None for row in report.rows)
    assert report.exit_status == 1 and report.compared == 2
    assert report.environment["python"]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("bad head"), "ERROR", "ValueError: bad head"),
        (NotImplementedError("64 heads only"), "UNSUPPORTED", "64 heads only"),
        (Unsupported("not today"), "UNSUPPORTED", "not today"),
        (MemoryError(), "ERROR", "MemoryError"),
    ],
)
def test_what_a_candidate_raises_is_its_status(error: Exception, status: str, words: str) -> None:
    report = run(BATCHES[:1], [Planner("fake", raising(error)), Planner("right")], "oracle")
    assert statuses(report) == [("fake", status), ("right", "PASS")]
    assert report.rows[0].verdict.reason.startswith(words)


def test_an_exception_that_cannot_be_read_is_an_error_like_any_other() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    verdict = run(BATCHES[:1], [Planner("fake", raising(Mute()))], "oracle").rows[0].verdict
    assert verdict.status is Status.ERROR
    assert "Mute: (its own message can't be read)" in verdict.reason


def test_a_case_too_large_for_this_machine_is_said_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = session.make_inputs

    def made(case: Case) -> Inputs:
        if case == BATCHES[0]:
            raise MemoryError("45 PiB")
        return make(case)

    monkeypatch.setattr(session, "make_inputs", made)
    report = run(BATCHES[:2], [Planner()], "oracle")
    assert statuses(report) == [("fake", "PASS")]
    said = f"{BATCHES[0]}: this machine has no memory for its inputs (45 PiB)"
    assert report.unavailable == (said,)
    assert report.exit_status == 3


def test_a_long_message_is_shortened_and_says_so() -> None:
    report = run(BATCHES[:1], [Planner("fake", raising(ValueError("x" * 5000)))], "oracle")
    assert "(3,000 more characters)" in report.rows[0].verdict.reason


def test_the_reference_runs_once_for_all_candidates() -> None:
    reference = Planner("reference")
    report = run(BATCHES[:2], [Planner("a"), Planner("b")], reference)
    assert reference.ran == [str(case) for case in BATCHES[:2]]
    assert {row.reference for row in report.rows} == {"reference"}
    assert report.exit_status == 0


@pytest.mark.parametrize(
    ("error", "damaged"),
    [(ValueError("no GPU left"), False), (DamagedGolden("a.safetensors is damaged"), True)],
)
def test_a_reference_that_fails_leaves_the_candidate_judged_alone(
    error: Exception, damaged: bool
) -> None:
    report = run(BATCHES[:2], [Planner()], Planner("reference", raising(error)))
    assert statuses(report) == [("fake", "PASS")] * 2
    assert all(str(error) in str(row.verdict.reference_failed) for row in report.rows)
    assert report.unavailable == ((str(error),) if damaged else ())
    assert report.exit_status == 3


def test_a_reference_without_a_result_fails_where_it_was_asked_for_by_name() -> None:
    class Empty(Planner):
        def supports(self, case: Case) -> str | None:
            return "nothing is recorded"

    report = run(BATCHES[:1], [Planner()], Empty("reference"))
    assert report.rows[0].verdict.reference_failed == "nothing is recorded"
    assert report.exit_status == 3


def test_the_default_reference_without_a_result_is_a_remark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "default_reference", lambda suite, device: "vllm")
    monkeypatch.setattr(registry, "recorded_references", lambda suite: [])
    report = run(BATCHES[:1], [Planner()], None)
    verdict = report.rows[0].verdict
    assert verdict.reference_failed is None and report.rows[0].reference is None
    assert verdict.notes[-1].startswith("judged without a reference: ")
    assert report.exit_status == 0


def test_where_the_default_reference_has_nothing_the_next_recorded_results_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = "golden:h200/flash_mla_decode", "golden:h200/flashinfer_fa3"
    monkeypatch.setattr(registry, "default_reference", lambda suite, device: first)
    recorded = parse_case("dcp-decode:lens=301+70,q=8+2,page=32,world=2,rank=1,stale=1,seed=43")
    unknown = parse_case("dcp-decode:lens=301+70,q=8+2,page=32,world=2,rank=1,seed=4711")
    report = run([recorded, unknown], ["torch"], None)
    assert [row.reference for row in report.rows] == [second, None]
    assert report.rows[0].verdict.reference_against_oracle and report.exit_status == 0
    assert summary.oracle_alone(report) == (
        f"1 of 2 cases of dcp-decode has no result in {second}: judged against the oracle alone",
    )
    assert summary.oracle_alone(run([unknown], ["torch"], "oracle")) == ()
    named = run([recorded], ["torch"], first)
    assert named.rows[0].verdict.reference_failed and named.exit_status == 3


def test_a_candidate_that_cannot_run_here_is_unavailable_when_named() -> None:
    report = run([PREFILL], ["pallas"], "oracle", Options(device="cpu"))
    assert statuses(report) == [("pallas", "UNSUPPORTED")]
    assert report.unavailable and "Hopper" in report.unavailable[0]
    assert report.exit_status == 3 and report.compared == 0


def test_names_that_do_not_exist_stop_the_run() -> None:
    with pytest.raises(UnknownImplementation, match="the nearest is 'jax-planner'"):
        run(BATCHES[:1], ["jax-planer"], None)
    with pytest.raises(UnknownImplementation, match="the nearest is 'vllm'"):
        run(BATCHES[:1], ["jax-planner"], "vlm")


def test_defaults_are_chosen_for_each_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "here", lambda suite, device: {
        "sparse-prefill": ["torch"], "prefill-plan": ["jax-planner"]}[suite])  # fmt: skip
    report = run([PREFILL, BATCHES[0]], None, "oracle", Options(device="cpu"))
    assert statuses(report) == [("torch", "PASS"), ("jax-planner", "PASS")]
    assert [row.case for row in report.rows] == [str(PREFILL), str(BATCHES[0])]


def test_a_case_that_no_candidate_serves_is_unsupported_for_each() -> None:
    report = run([PREFILL], ["jax-planner", "torch-planner"], "oracle")
    assert [row.verdict.status for row in report.rows] == [Status.UNSUPPORTED] * 2


@pytest.mark.parametrize("after", [0, 1, 3])
def test_ctrl_c_keeps_the_rows_that_were_finished(after: int) -> None:
    def progress(done: int, total: int, what: str) -> None:
        assert total == len(BATCHES) and what
        if done == after:
            raise KeyboardInterrupt

    report = run(BATCHES, [Planner()], "oracle", progress=progress)
    assert [row.case for row in report.rows] == [str(case) for case in BATCHES[:after]]
    assert report.interrupted and report.exit_status == 3


def test_ctrl_c_inside_a_candidate_ends_the_run_and_not_the_row_before() -> None:
    first = str(BATCHES[0])

    def act(inputs: PrefillPlanInputs) -> None:
        if str(inputs.case) != first:
            raise KeyboardInterrupt

    report = run(BATCHES, [Planner("fake", act)], "oracle")
    assert len(report.rows) == 1 and report.interrupted


def test_progress_counts_every_row() -> None:
    seen = []
    run(BATCHES, [Planner("a"), Planner("b")], None, progress=lambda *words: seen.append(words))
    assert seen[-1][:2] == (8, 8)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_a_call_in_this_process_is_held_to_the_limit_too() -> None:
    slow = Planner("slow", lambda _: time.sleep(0.05))
    report = run(BATCHES[:1], [slow, Planner("quick")], "oracle", Options(timeout=0.04))
    assert statuses(report)[0] == ("slow", "TIMEOUT")
    assert "0.04 s are allowed" in report.rows[0].verdict.reason


def test_a_user_s_function_is_judged_in_its_own_process(
    candidate_file: Callable[[str], Path],
) -> None:
    path = candidate_file("""
        import os
        from jax_impl.planning import plan_prefill_chunks as right

        def wrong(seq_lens, query_lens, **_):
            return []

        def dies(seq_lens, query_lens, **_):
            os.abort()
    """)
    names = [f"{path}:right", f"{path}:wrong", f"{path}:dies"]
    report = run(BATCHES[:2], names, "torch-planner")
    assert [row.verdict.status.name == "PASS" for row in report.rows] == [True, False, False] * 2
    assert [row.verdict.status.name for row in report.rows][2::3] == ["CRASH"] * 2


def test_a_name_of_the_author_s_does_not_hide_how_to_find_the_function(
    candidate_file: Callable[[str], Path],
) -> None:
    path = candidate_file("""
        import compare

        @compare.candidate(name="ours")
        def f(seq_lens, query_lens, **_):
            return []
    """)
    report = run(BATCHES[:1], [f"{path}:f", "jax-planner"], "oracle")
    assert [(row.candidate, row.target) for row in report.rows] == [
        ("ours", f"{path}:f"),
        ("jax-planner", None),
    ]
    assert f"--candidate {path}:f" in summary.reproducer(report.rows[0], report)


class Flaky:
    """Zeros, and from the second run on one element that isn't."""

    name = "flaky"
    suites = frozenset({"sparse-prefill"})

    def __init__(self) -> None:
        self.runs = 0

    def supports(self, case: Case) -> str | None:
        return None

    def run(self, inputs: Inputs) -> Result:
        right = registry.find("torch", "cpu").run(inputs)
        assert isinstance(right, SparsePrefillResult)
        self.runs += 1
        out = right.out.copy()
        if self.runs > 1:
            bits = out.view(np.uint16)
            bits[1, 2, 3] ^= 1
        return dataclasses.replace(right, out=out)


def test_other_bits_from_run_to_run_are_nondeterministic() -> None:
    report = run([PREFILL], [Flaky(), "torch"], "oracle", Options(device="cpu", repeat=3))
    flaky, steady = report.rows
    assert flaky.verdict.status is Status.NONDETERMINISTIC
    assert "2 of 2 repeats differ from the first run; run 2: 1 of 4,096 elements of out differ" in (
        flaky.verdict.reason
    )
    assert "[1, 2, 3]" in flaky.verdict.reason
    assert steady.verdict.status is Status.PASS
    assert report.exit_status == 1
    assert (
        run([PREFILL], [Flaky()], "oracle", Options(device="cpu")).rows[0].verdict.status
        is Status.PASS
    )


def test_one_buffer_that_is_given_back_and_written_to_again_is_nondeterministic_too() -> None:
    class OneBuffer(Flaky):
        def run(self, inputs: Inputs) -> Result:
            result = super().run(inputs)
            assert isinstance(result, SparsePrefillResult)
            self.buffer = getattr(self, "buffer", result.out)
            self.buffer[:] = result.out
            return dataclasses.replace(result, out=self.buffer)

    verdict = (
        run([PREFILL], [OneBuffer()], "oracle", Options(device="cpu", repeat=2)).rows[0].verdict
    )
    assert verdict.status is Status.NONDETERMINISTIC


def test_a_wrong_result_stays_wrong_when_it_changes_too() -> None:
    plans = iter([PlanResult(chunks=()), None, PlanResult(chunks=())])
    it = Planner("fake", lambda _: next(plans))
    verdict = run(BATCHES[:1], [it], "oracle", Options(repeat=3)).rows[0].verdict
    assert verdict.status not in (Status.PASS, Status.NONDETERMINISTIC)
    assert verdict.notes[-1].startswith("1 of 2 repeats differ")


def test_nan_and_minus_zero_are_compared_by_their_bits() -> None:
    def result(value: float) -> SparsePrefillResult:
        return SparsePrefillResult(
            out=np.full((1, 1, 512), value, ml_dtypes.bfloat16), lse=np.zeros((1, 1), np.float32)
        )

    assert difference(result(np.nan), result(np.nan)) is None
    assert "512 of 512 elements of out differ" in str(difference(result(0.0), result(-0.0)))


def test_tensors_by_name_are_compared_by_their_bits_too() -> None:
    case = parse_case("v4-stages:stage=global_topk,seq=301+40,q=4+3,ratio=2,topk=33")
    inputs = make_inputs(case)
    right = registry.find("torch", "cpu").run(inputs)

    class Drifting(Planner):
        def run(self, inputs: Inputs) -> Result:
            right.arrays["slots"][0, 0] += 1  # type: ignore[attr-defined]
            return right

    assert difference(right, right) is None
    found = run_repeatedly(Drifting(), inputs, 2).difference
    assert found == (
        "1 of 1 repeats differ from the first run; run 2: 1 of 231 elements of slots differ, the "
        "first at [0, 0]"
    )


def test_one_run_is_one_call() -> None:
    it = Planner()
    assert run_repeatedly(it, make_inputs(BATCHES[0]), 1).difference is None
    assert len(it.ran) == 1


def test_the_interpreter_takes_the_marked_cases_unless_it_is_asked_for_more() -> None:
    suite = SUITES["sparse-prefill"]
    offer = suite.offer("pallas-interpret")
    assert offer is not None and offer.marked
    marked = parse_case(offer.marked[0])
    other = next(case for case in default_cases(suite.name) if str(case) not in offer.marked)

    class Refusing(Planner):
        """Notes what it is asked to run, and refuses it."""

        suites = frozenset({"sparse-prefill"})

        def run(self, inputs: Inputs) -> Result:
            self.ran.append(str(inputs.case))
            raise Unsupported("not now")

    for options, taken in (
        (Options(), [marked]),
        (Options(named=frozenset({other})), [marked, other]),
        (Options(full=True), [marked, other]),
    ):
        slow, quick = Refusing("pallas-interpret"), Refusing("quick")
        report = run([marked, other], [slow, quick], "oracle", options)
        assert slow.ran == [str(case) for case in taken]
        assert quick.ran == [str(marked), str(other)]
        said = report.rows[2].verdict
        assert said.status is Status.UNSUPPORTED
        assert ("--full all that it can" in said.reason) == (len(taken) == 1)
