from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compare.protocol.case import Case
from compare.run import jobs, registry
from compare.run.runner import run
from compare.run.tasks import Options, Task
from compare.suites.table import parse_case
from compare.user.implementation import UserImplementation

PLANS = [
    parse_case(f"prefill-plan:seq={n}+40,q=5+3,window=8,max_len=64,max_tokens=16,chunk=1")
    for n in (16, 24, 32, 40)
]


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
        cases, [f"{path}:f", "jax-planner"], "oracle", Options(jobs=2, device="cpu"),
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
    report = run(
        PLANS, ["jax-planner", f"{path}:fatal", "torch-planner"], "oracle", Options(jobs=2)
    )
    found = {(row.case, row.candidate): row.verdict for row in report.rows}
    assert len(found) == len(report.rows) == 12
    crashed = [key for key, verdict in found.items() if verdict.status.name != "PASS"]
    assert crashed == [(str(PLANS[1]), f"{path}:fatal")]
    assert found[crashed[0]].status.name == "CRASH"
    assert "signal 9 (SIGKILL)" in found[crashed[0]].reason


def test_a_job_that_is_done_takes_what_is_left_while_another_works(
    candidate_file: Callable[[str], Path], tmp_path: Path
) -> None:
    path = candidate_file(f"""
        import os, pathlib, time
        import compare

        @compare.candidate(framework="numpy")
        def f(q, **_):
            folder = pathlib.Path({str(tmp_path)!r})
            (folder / f"{{len(q)}}.done").touch()
            for _ in range(600 if len(q) == 30 else 0):  # the longest ends when all others have
                if len(list(folder.glob("*.done"))) == 6:
                    break
                time.sleep(0.1)
            raise ValueError(f"in {{os.getppid()}}")
    """)
    cases: list[Case] = [parse_case(f"sparse-prefill:s_q={n},s_kv=40,h=1") for n in range(25, 31)]
    report = run(cases, [f"{path}:f"], "oracle", Options(jobs=2, device="cpu"))
    ran = [row.verdict.reason.splitlines()[0] for row in report.rows]
    assert len(set(ran[:-1])) == 1 and len(set(ran)) == 2


@pytest.mark.parametrize(("lived", "blamed"), [(False, [0, 1]), (True, [])])
def test_of_a_job_that_ended_before_it_began_its_cases(lived: bool, blamed: list[int]) -> None:
    """Its candidates' fault where no job could begin; not where the process had worked before."""
    tasks = {i: Task(index=i, case=case, candidates=(0,)) for i, case in enumerate(PLANS[:2])}
    job = jobs._Job(child=None, tasks=tasks, lived=lived)  # type: ignore[arg-type]
    found = jobs._blame(job, [registry.find("jax-planner")], "its process ended")
    assert [event.case for event in found] == blamed
    assert len(job.tasks) == 2 - len(blamed)


def test_no_folder_of_a_run_with_jobs_stays(
    candidate_file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = candidate_file("""
        import os, signal

        def f(seq_lens, query_lens, **_):
            os.kill(os.getppid(), signal.SIGKILL)
    """)
    cases = [*PLANS[:1], parse_case("sparse-prefill:s_kv=40,h=1")]
    run(cases, [f"{path}:f"], "oracle", Options(jobs=2, device="cpu"))
    assert list(temporary.iterdir()) == []


def test_ctrl_c_ends_the_jobs_and_keeps_their_rows() -> None:
    def progress(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    report = run(PLANS, ["jax-planner"], "oracle", Options(jobs=2), progress=progress)
    assert report.interrupted and len(report.rows) == 2


def test_what_has_no_name_cannot_go_to_a_job() -> None:
    with pytest.raises(ValueError, match="with jobs > 1 implementations are found by name"):
        run(PLANS, [UserImplementation(lambda **_: [])], "oracle", Options(jobs=2))


def test_a_case_too_big_to_have_company_runs_after_the_others_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ("s_q=70000,h=128", "s_q=2", "s_q=70000,h=128,seed=1", "s_q=4096,h=128,d=576")
    cases: list[Case] = [parse_case(f"sparse-prefill:{line}") for line in lines]
    begun = []

    def remember(self, groups, candidates, order):
        begun.append(sorted(task.index for group in groups for task in group))
        yield from ()

    monkeypatch.setattr(jobs.Jobs, "start", lambda self, most: None)
    monkeypatch.setattr(jobs.Jobs, "_stage", remember)
    run(cases, ["xla"], "oracle", Options(jobs=6, device="cpu"))
    assert begun == [[1, 3], [0], [2]]
