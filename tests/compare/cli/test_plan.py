"""`plan` with the real planners."""

from __future__ import annotations

import dataclasses
import json

import pytest

from compare.judging import plans as module
from compare.judging.plans import PlanResult
from compare.run import registry
from compare.suites.prefill_plan.planner import Planner
from compare.suites.table import parse_case
from tests.compare.cli.command_line import command_line

# vllm-project/vllm#49059: budget 1 * (64 / 4 + 8 + 16) = 40 rows.
LIMITS = {
    "--compress-ratio": "4",
    "--window": "8",
    "--max-model-len": "64",
    "--max-num-batched-tokens": "16",
    "--chunk-size": "1",
}
ABORTS = ("40,40,16,64,0", "0,5,0,3,0")
FINE = ("40,40,16,64", "1,5,2,3")


def plan(seq_lens: str, query_lens: str, *more: str, **changes: str | None):
    limits = LIMITS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    words = [word for name, value in limits.items() if value is not None for word in (name, value)]
    lists = ["--seq-lens", seq_lens, "--query-lens", query_lens]
    return command_line("plan", *lists, *words, *more)


def test_the_shipped_plan_of_a_zero_query_batch_goes_wrong_and_the_chunks_are_named():
    found = plan(*ABORTS)
    assert found.status == 1
    lines = found.out.splitlines()
    for chunk, request, token in ((0, 0, 0), (2, 2, 5), (4, 4, 8)):
        assert (
            f"shipped (vllm-0.33.0): P1: chunk {chunk} (request {request}) has no query token, its "
            f"range is [{token}, {token}): FlashMLA aborts on it, s_q = 0" in lines
        )
    assert "The fixed plan is right." in lines
    assert not [line for line in lines if line.startswith("fixed: P")]


def test_the_plans_stand_side_by_side():
    table = [line.split("  ") for line in plan(*ABORTS).out.splitlines() if "chunk " in line]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in table if line[0] != ""]
    assert [row for row in rows if row[0].startswith("chunk")] == [
        ["chunk 0", "[0, 1)", "[0, 0)", "10", "17", "EMPTY"],
        ["chunk 1", "[1, 2)", "[0, 5)", "10", "22", "=", "chunk 0", "[1, 2)", "[0, 5)", "10", "22"],
        ["chunk 2", "[2, 3)", "[5, 5)", "4", "11", "EMPTY"],
        ["chunk 3", "[3, 4)", "[5, 8)", "16", "26", "=", "chunk 1", "[3, 4)", "[5, 8)", "16", "26"],
        ["chunk 4", "[4, 5)", "[8, 8)", "0", "0", "EMPTY"],
    ]


def test_json_holds_both_plans_and_what_goes_wrong():
    found = plan(*ABORTS, "--json")
    assert found.status == 1
    data = json.loads(found.out)
    assert data["arguments"]["query_lens"] == [0, 5, 0, 3, 0]
    assert [(c["start"], c["end"]) for c in data["fixed"]["chunks"]] == [(1, 2), (3, 4)]
    assert [
        (c["query_start"], c["query_end"], c["compressed_rows"], c["workspace_rows"])
        for c in data["fixed"]["chunks"]
    ] == [(0, 5, 10, 22), (5, 8, 16, 26)]
    assert len(data["shipped"]["chunks"]) == 5
    assert sum("FlashMLA aborts on it" in said for said in data["shipped"]["wrong"]) == 3
    assert data["fixed"]["wrong"] == []
    assert (data["agree"], data["exit_status"]) == (False, 1)


@pytest.mark.parametrize(("seq_lens", "query_lens"), [FINE, ("none", "none")])
def test_without_zero_queries_the_plans_are_equal_and_right(seq_lens, query_lens):
    found = plan(seq_lens, query_lens)
    assert found.status == 0
    assert found.out.splitlines()[-1] == "The two plans are equal and right."
    data = json.loads(plan(seq_lens, query_lens, "--json").out)
    assert data["agree"] is True
    assert data["shipped"]["chunks"] == data["fixed"]["chunks"]


def test_a_batch_without_any_query_has_an_empty_fixed_plan():
    data = json.loads(plan("40,40", "0,0", "--json").out)
    assert data["fixed"]["chunks"] == []
    (shipped,) = data["shipped"]["chunks"]  # 2 * (10 + 7) = 34 rows of 40
    assert (shipped["query_start"], shipped["query_end"]) == (0, 0)
    assert data["exit_status"] == 1


@pytest.mark.parametrize(
    "lists", [("40+40+16+64+0", "0 5 0 3 0"), ("40, 40, 16,64 0", "0+5,0 3+0")]
)
def test_lists_may_be_joined_by_commas_plus_signs_or_blanks(lists):
    assert plan(*lists).out == plan(*ABORTS).out


def test_window_and_chunk_size_have_the_planner_s_defaults():
    data = json.loads(plan(*FINE, "--json", window=None, chunk_size=None).out)
    assert (data["arguments"]["window"], data["arguments"]["chunk_size"]) == (128, 4)


def test_whether_there_are_compressed_entries_can_be_said():
    rows = {
        words: json.loads(plan("40", "8", "--json", *words, compress_ratio="1").out)
        for words in ((), ("--has-compressed",), ("--no-compressed",))
    }
    compressed = [data["fixed"]["chunks"][0]["compressed_rows"] for data in rows.values()]
    assert compressed == [0, 40, 0]


def test_the_case_line_is_the_same_batch():
    found = plan(*ABORTS)
    case = parse_case(found.out.splitlines()[0])
    data = json.loads(plan(*ABORTS, "--json").out)
    assert str(case) == data["case"]
    assert case.q == (0, 5, 0, 3, 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        (("3,x", "1,1"), "--seq-lens 3,x: 'x' isn't accepted"),
        (("3,4", "1,1.5"), "--query-lens 1,1.5: '1.5' isn't accepted"),
        (("3,2147483648", "1,1"), "'2147483648' isn't accepted; accepted: whole numbers from 0 to"),
        (("3,4", ""), "--query-lens is empty"),
        (("3,4", "1"), "query_lens"),
        (("3,4", "1,5"), "query_lens[1]"),
    ],
)
def test_words_that_no_planner_takes_are_2(lists, said):
    found = plan(*lists)
    assert (found.status, found.out) == (2, "")
    assert found.err.startswith("mla-crosscheck: ")
    assert said in found.err


@pytest.mark.parametrize(
    "changes", [{"compress_ratio": "-1"}, {"window": "0"}, {"max_model_len": "x"}]
)
def test_numbers_that_no_planner_takes_are_2(changes):
    found = plan(*FINE, **changes)
    assert found.status == 2
    assert f"--{next(iter(changes)).replace('_', '-')}" in found.err


def test_a_fixed_plan_that_goes_wrong_is_1_too(monkeypatch):
    find = registry.find

    def with_the_shipped_rules(name, device=None):
        return find(module.SHIPPED if name == module.FIXED else name, device)

    monkeypatch.setattr(registry, "find", with_the_shipped_rules)
    found = plan(*ABORTS)
    assert found.status == 1
    assert "fixed: P1: chunk 0 (request 0) has no query token" in found.out
    assert "the planners jax-planner and torch-planner disagree about this batch" in found.out
    assert "is right" not in found.out


def test_two_right_plans_that_differ_are_0(monkeypatch):
    # Requests 0 and 2 fit into one chunk; the zero-query request between them may end it.
    batch = ("8,8,8", "2,0,2")
    limits = {"window": "8", "max_num_batched_tokens": "64", "chunk_size": "4"}
    together = registry.find(module.FIXED)
    assert plan(*batch, **limits).out.splitlines()[-1] == "The two plans are equal and right."

    class Apart(Planner):
        def __init__(self) -> None:
            pass

        def run(self, inputs):
            whole = together.run(inputs)
            assert isinstance(whole, PlanResult)
            (chunk,) = whole.chunks
            return dataclasses.replace(
                whole,
                chunks=(
                    dataclasses.replace(chunk, end=1, query_end=2),
                    dataclasses.replace(chunk, start=2, query_start=2),
                ),
            )

    find = registry.find
    names = (module.FIXED, module.FIXED_AGAIN)
    monkeypatch.setattr(registry, "find", lambda n, d=None: Apart() if n in names else find(n, d))
    found = plan(*batch, **limits)
    assert found.status == 0
    assert found.out.splitlines()[-1].startswith("The two plans differ and both are right")
