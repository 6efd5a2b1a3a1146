from __future__ import annotations

from compare.run.order import by_shape, longest_first, variety_first
from compare.run.session import Task
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.table import default_cases, parse_case


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


def test_every_task_stays_and_those_that_are_not_interpreted_follow_in_their_order() -> None:
    tasks = tasks_of("s_q=9", "s_q=1", "s_q=8", "s_q=2")
    ordered = variety_first(tasks, lambda case: str(case) != str(tasks[0].case))
    assert sorted(task.index for task in ordered) == [0, 1, 2, 3]
    assert ordered[-1].index == 0
    ordered = variety_first(tasks, lambda case: False)
    assert ordered == tasks


def test_what_was_not_shown_yet_comes_before_more_of_the_same() -> None:
    tasks = tasks_of("seed=1", "seed=2,s_kv=257", "seed=3,s_kv=258", "sink=mixed,topk=192")
    assert [task.index for task in variety_first(tasks, lambda case: True)] == [0, 3, 1, 2]


def test_of_two_cases_alike_the_quicker_comes_first() -> None:
    tasks = tasks_of("s_q=60,h=128", "s_q=2,h=128")
    assert [task.index for task in variety_first(tasks, lambda case: True)] == [1, 0]


def test_half_of_the_default_cases_shows_what_all_of_them_show() -> None:
    cases = default_cases("sparse-prefill")
    tasks = [Task(index=i, case=case, candidates=(0,)) for i, case in enumerate(cases)]
    ordered = variety_first(tasks, lambda case: True)

    def shown(some: list[Task]) -> set[tuple[str, object]]:
        return {
            (key, getattr(task.case, key))
            for task in some
            if isinstance(task.case, SparsePrefillCase)
            for key in ("h", "d", "data", "sink", "length", "order", "strided", "plan")
        }

    assert shown(ordered[: len(cases) // 2]) == shown(tasks)
    assert shown(tasks[: len(cases) // 2]) != shown(tasks)


def test_cases_of_both_kernels_take_turns_in_the_interpreter_s_time() -> None:
    lines = [
        "sparse-prefill:s_q=2", "sparse-prefill:s_q=2,seed=2", "dcp-decode:lens=90,q=2",
        "dcp-decode:lens=91,q=2,seed=2", "decode-plan:lens=9,q=1",
    ]  # fmt: skip
    tasks = [Task(index=i, case=parse_case(line), candidates=(0,)) for i, line in enumerate(lines)]
    ordered = variety_first(tasks, lambda case: "plan" not in case.suite)
    assert {task.index for task in ordered[:2]} == {0, 2} and ordered[-1].index == 4


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


def test_half_of_the_default_batches_shows_what_all_of_them_show() -> None:
    cases = default_cases("v4-prefill")
    tasks = [Task(index=i, case=case, candidates=(0,)) for i, case in enumerate(cases)]
    ordered = variety_first(tasks, lambda case: True)
    assert sorted(task.index for task in ordered) == list(range(len(tasks)))
    first = [cases[task.index] for task in ordered[: len(tasks) // 2]]
    for shown in (
        lambda case: case.ratio,
        lambda case: case.data,
        lambda case: case.format,
        lambda case: case.page,
        lambda case: case.plan,
        lambda case: case.sink,
        lambda case: bool(case.images),
        lambda case: 0 in case.q,
        lambda case: case.bound > 0,
    ):
        assert {shown(case) for case in first} == {shown(case) for case in cases}
