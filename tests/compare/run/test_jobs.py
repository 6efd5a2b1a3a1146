from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compare.cases.case import Case
from compare.run.jobs import shares
from compare.run.runner import run
from compare.run.session import Task
from compare.run.user import UserImplementation
from compare.suites import parse_case

PLANS = [
    parse_case(f"prefill-plan:seq={n}+40,q=5+3,window=8,max_len=64,max_tokens=16,chunk=1")
    for n in (16, 24, 32, 40)
]


def tasks_of(*lines: str) -> list[Task]:
    return [
        Task(index=i, case=parse_case(f"sparse-prefill:{line}"), candidates=(0,))
        for i, line in enumerate(lines)
    ]


def test_equal_shapes_go_to_one_job_and_every_case_to_exactly_one() -> None:
    tasks = tasks_of(
        "s_kv=300,seed=1", "s_kv=400", "s_kv=300,seed=2", "s_kv=500", "s_kv=400,seed=5,sink=mixed",
        "s_kv=300,data=flat",
    )  # fmt: skip
    parts = shares(tasks, 3)
    assert sorted(t.index for part in parts for t in part) == list(range(6))
    assert [0, 2, 5] in [[t.index for t in part] for part in parts]
    assert len(parts) == 3


def test_a_heavy_shape_has_a_job_for_itself() -> None:
    tasks = tasks_of("s_q=4096,s_kv=8192,topk=2048,h=128", *(f"s_kv={n}" for n in range(300, 306)))
    parts = shares(tasks, 2)
    assert [0] in [[t.index for t in part] for part in parts]


def test_there_are_no_more_jobs_than_shapes() -> None:
    assert len(shares(tasks_of("s_kv=300", "s_kv=300,seed=1"), 8)) == 1


def test_jobs_give_the_rows_of_one_process_in_the_order_of_the_cases(
    candidate_file: Callable[[str], Path],
) -> None:
    path = candidate_file("""
        import compare, numpy as np

        @compare.candidate(framework="numpy")
        def f(q, kv, indices, **_):
            return np.zeros(len(kv)), None, np.zeros(1)
    """)
    lines = ("s_kv=40,h=1", "s_kv=41,h=1", "s_kv=40,h=1,seed=3")
    cases: list[Case] = [parse_case(f"sparse-prefill:{line}") for line in lines]
    seen = []
    report = run(
        cases, [f"{path}:f", "jax-planner"], "oracle", jobs=2, device="cpu",
        progress=lambda *words: seen.append(words),
    )  # fmt: skip
    assert [(row.case, row.verdict.status.name) for row in report.rows] == [
        (str(case), "SHAPE") for case in cases
    ]
    reasons = [row.verdict.reason for row in report.rows]
    assert [f"[{n}]" in reason for n, reason in zip((40, 41, 40), reasons, strict=True)] == [
        True
    ] * 3
    assert seen[-1][:2] == (3, 3)
    assert report.exit_status == 1


def test_a_job_that_dies_costs_the_candidate_it_ran_and_nothing_else(
    candidate_file: Callable[[str], Path],
) -> None:
    path = candidate_file("""
        import os, signal, time
        from jax_impl.planning import plan_prefill_chunks as right

        def fatal(seq_lens, query_lens, **others):
            if seq_lens[0] == 24:
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(30)
            return right(seq_lens, query_lens, **others)
    """)
    report = run(PLANS, ["jax-planner", f"{path}:fatal", "torch-planner"], "oracle", jobs=2)
    found = {(row.case, row.candidate): row.verdict for row in report.rows}
    assert len(found) == len(report.rows) == 12
    crashed = [key for key, verdict in found.items() if verdict.status.name != "PASS"]
    assert crashed == [(str(PLANS[1]), f"{path}:fatal")]
    assert found[crashed[0]].status.name == "CRASH"
    assert "signal 9 (SIGKILL)" in found[crashed[0]].reason


def test_ctrl_c_ends_the_jobs_and_keeps_their_rows() -> None:
    def progress(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    report = run(PLANS, ["jax-planner"], "oracle", jobs=2, progress=progress)
    assert report.interrupted and len(report.rows) == 2


def test_what_has_no_name_cannot_go_to_a_job() -> None:
    with pytest.raises(ValueError, match="with jobs > 1 implementations are found by name"):
        run(PLANS, [UserImplementation(lambda **_: [])], "oracle", jobs=2)
