from __future__ import annotations

import os

import pytest

from compare.run import registry, schedule
from compare.run.schedule import by_shape, helpful_jobs, longest_first
from compare.run.tasks import Task
from compare.suites.table import SUITES, default_cases, parse_case


def tasks_of(*lines: str) -> list[Task]:
    return [
        Task(index=i, case=parse_case(f"sparse-prefill:{line}"), candidates=(0,))
        for i, line in enumerate(lines)
    ]


def indices(groups: list[list[Task]]) -> list[list[int]]:
    return [[task.index for task in group] for group in groups]


def test_cases_of_a_kernel_s_shape_stay_together() -> None:
    tasks = tasks_of(
        "s_kv=300,seed=1", "s_kv=400", "s_kv=300,seed=2", "s_kv=500", "s_kv=400,seed=5,sink=mixed",
        "s_kv=300,data=flat",
    )  # fmt: skip
    assert indices(by_shape(tasks)) == [[0, 2, 5], [1, 4], [3]]


def test_heads_and_widths_that_are_padded_to_the_same_are_one_shape() -> None:
    tasks = tasks_of("h=64,topk=128", "h=16,topk=3", "h=65,topk=128", "h=64,topk=129", "d=576")
    assert indices(by_shape(tasks)) == [[0, 1], [2], [3], [4]]


def test_the_longest_are_begun_first() -> None:
    tasks = tasks_of("s_kv=300", "s_q=4096,topk=2048,h=128", "s_q=213", "s_q=70000,topk=256")
    assert indices(longest_first(by_shape(tasks))) == [[3], [1], [2], [0]]


def test_many_small_cases_of_one_shape_are_begun_before_one_that_is_little_larger() -> None:
    tasks = tasks_of("s_q=63", *(f"s_q=62,seed={n}" for n in range(3)))
    assert indices(longest_first(by_shape(tasks))) == [[1, 2, 3], [0]]


def test_a_batch_of_another_group_or_size_is_another_program() -> None:
    words = ["lens=90,q=2", "lens=90,q=2,data=flat,stale=1", "lens=90,q=2,world=2", "lens=91,q=2"]
    tasks = [
        Task(index=i, case=parse_case(f"dcp-decode:{line}"), candidates=(0,))
        for i, line in enumerate(words)
    ]
    assert indices(by_shape(tasks)) == [[0, 1], [2], [3]]


def v4_tasks(*lines: str) -> list[Task]:
    return [Task(index=i, case=parse_case(line), candidates=(0,)) for i, line in enumerate(lines)]


def test_batches_of_the_v4_path_whose_chunks_are_alike_stay_together() -> None:
    batch = "v4-prefill:seq=300+70,q=3+4,h=16"
    tasks = v4_tasks(
        f"{batch},seed=1", f"{batch},bound=8", f"{batch},data=exact", f"{batch},format=bf16",
        f"{batch},sink=mixed,seed=3", "v4-stages:stage=gather,seq=300+70,q=3+4",
    )  # fmt: skip
    assert indices(by_shape(tasks)) == [[0, 2, 4], [1], [3], [5]]


def test_a_long_batch_of_the_v4_path_is_begun_first() -> None:
    tasks = v4_tasks(
        "v4-prefill:seq=300,q=3", "v4-prefill:seq=9000,q=1024,h=128,max_len=16384",
        "v4-stages:stage=combine,record=3",
    )  # fmt: skip
    assert indices(longest_first(by_shape(tasks)))[0] == [1]


def test_another_process_is_started_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_available_bytes", lambda: 64e9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    every = [case for suite in SUITES for case in default_cases(suite)]
    prefill = default_cases("sparse-prefill")
    assert helpful_jobs(every, None) == helpful_jobs(prefill, ["xla"]) == 2
    assert helpful_jobs(prefill[:3], None) == 1
    assert helpful_jobs(prefill, ["mine.py:f"]) == helpful_jobs(prefill, ["flash_mla"]) == 1
    assert helpful_jobs(every, [registry.find("xla")]) == 1
    assert helpful_jobs([], None) == 1


def test_no_more_processes_than_there_are_cores_and_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = [case for suite in SUITES for case in default_cases(suite)]
    for cores, memory, jobs in ((1, 64e9, 1), (3, 64e9, 3), (64, 64e9, 8), (64, 3e9, 2), (8, 0, 1)):
        monkeypatch.setattr(schedule, "_available_bytes", lambda memory=memory: memory)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert helpful_jobs(every, None) == jobs
