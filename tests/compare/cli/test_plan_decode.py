"""`plan --decode` with the real planners."""

from __future__ import annotations

import dataclasses
import json

import pytest

from compare.judging import plans as module
from compare.judging.plans import DecodePlanResult
from compare.run import registry
from tests.compare.cli.command_line import command_line

RAGGED = ("301,97", "8,2")


def plan(total_lens: str, query_lens: str, *more: str, max_query_len: int = 8, world: int = 2):
    lists = ["--total-lens", total_lens, "--query-lens", query_lens]
    sizes = ["--max-query-len", str(max_query_len), "--world", str(world)]
    return command_line("plan", "--decode", *lists, *sizes, *more)


def lines_of(found) -> list[str]:
    return found.out.splitlines()


def rows_of(found) -> list[list[str]]:
    """The table's lines, cells separated by two blanks or more."""
    cells = [[c.strip() for c in line.split("  ") if c.strip()] for line in lines_of(found)]
    return [line for line in cells if line and line[0].isdecimal()]


def test_8_and_2_viewed_as_5_and_5_goes_wrong_and_each_row_is_told():
    found = plan(*RAGGED)
    assert found.status == 1
    said = lines_of(found)
    assert "decode-plan:lens=301+97,q=8+2,max_q=8" in said
    assert "shipped (vllm-0.33.0): 8+2 is viewed as 5+5" in said
    assert (
        "shipped (vllm-0.33.0): rows 0 to 4 of request 0 have bounds 297, 298, 299, 300, 301; "
        "due: bounds 294, 295, 296, 297, 298" in said
    )
    assert (
        "shipped (vllm-0.33.0): rows 5 to 7 of request 0 use block table and length of request 1, "
        "with bounds 93, 94, 95; due: request 0 with bounds 299, 300, 301" in said
    )
    assert "The fixed plan is right." in said
    assert not [line for line in said if line.startswith("fixed: rows")]


def test_the_plans_stand_side_by_side_with_the_keys_of_every_rank():
    rows = rows_of(plan(*RAGGED))
    assert rows[0] == [
        "0", "request 0, 1 of 8", "request 0", "297", "149+148", "request 0", "294", "147+147",
    ]  # fmt: skip
    assert rows[9] == [
        "9", "request 1, 2 of 2", "request 1", "97", "49+48", "=", "request 1", "97", "49+48",
    ]  # fmt: skip
    assert len(rows) == 10


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 2), (8, 4), (3, 64)])
def test_key_counts_of_all_ranks_add_up_to_the_bound(world, interleave):
    found = plan(*RAGGED, "--interleave", str(interleave), "--json", world=world)
    rows = json.loads(found.out)["fixed"]["rows"]
    assert [row["bound"] for row in rows] == [*range(294, 302), 96, 97]
    for row in rows:
        assert sorted(row["local_counts"]) == [str(rank) for rank in range(world)]
        assert sum(row["local_counts"].values()) == row["bound"]


def test_two_bounds_for_nine_rows_is_quoted():
    found = plan("301,97", "8,1", "--rank", "1")
    assert found.status == 1
    assert "shipped (vllm-0.33.0): no plan" in lines_of(found)
    assert [line for line in lines_of(found) if "2 bounds for 9 rows" in line]
    assert rows_of(found)[0] == ["0", "request 0, 1 of 8", "request 0", "294", "147"]


def test_json_holds_both_plans_and_what_goes_wrong():
    found = plan("301,97", "8,1", "--json")
    assert found.status == 1
    data = json.loads(found.out)
    assert data["arguments"]["query_lens"] == [8, 1]
    assert data["shipped"]["rows"] is None
    assert data["shipped"]["wrong"][0].startswith("2 bounds for 9 rows")
    assert data["fixed"]["ragged"] is True
    assert data["fixed"]["wrong"] == []
    assert data["exit_status"] == 1


def test_padding_that_makes_a_count_come_out_goes_wrong():
    found = plan(*RAGGED, "--pad-rows", "6")
    assert found.status == 1
    assert "shipped (vllm-0.33.0): 8+2 and 6 rows of padding is viewed as 8+8" in lines_of(found)
    assert rows_of(found)[12] == ["12", "padding", "padding", "0+0", "=", "padding", "0+0"]


@pytest.mark.parametrize(
    ("total_lens", "query_lens", "max_query_len"),
    [("301,97", "3,3", 3), ("9,5", "1,1", 1), ("none", "none", 1)],
)
def test_a_uniform_batch_is_right_by_both_rules(total_lens, query_lens, max_query_len):
    found = plan(total_lens, query_lens, max_query_len=max_query_len)
    assert found.status == 0
    assert lines_of(found)[-1] == "Both plans are right."


def test_a_uniform_batch_below_its_promise_has_the_same_rows_in_either_view():
    found = plan("9,5", "1,1", max_query_len=8)
    assert found.status == 0
    assert "vllm-0.33.0 views the batch as [2, 1]: the same rows as one per token" in lines_of(
        found
    )


def test_with_one_rank_the_shipped_rules_have_no_fault():
    found = plan(*RAGGED, world=1)
    assert found.status == 0
    assert [line for line in lines_of(found) if line.startswith("with one rank vllm-0.33.0")]


def test_a_draft_block_sees_all_of_its_request():
    found = plan("17", "3", "--no-causal", max_query_len=3)
    assert found.status == 0
    assert [row[3] for row in rows_of(found)] == ["17", "17", "17"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_ragged_draft_that_is_refused_is_no_plan_that_goes_wrong(world):
    found = plan("300,40", "3,1", "--no-causal", max_query_len=3, world=world)
    assert found.status == 0
    said = lines_of(found)
    assert "shipped (vllm-0.33.0): no plan" in said
    assert [line for line in said if line.startswith("vllm-0.33.0 refuses the batch, and nothing")]
    assert said[-1] == "The fixed plan is right."
    assert not [line for line in said if line == "Both plans are right."]


def test_without_a_group_no_bounds_of_a_group_are_spoken_of():
    found = plan("300,40", "1,0", max_query_len=1, world=1)
    assert found.status == 1
    assert "causal_seqlens_kv_global" not in found.out
    assert "lengths and block table of 2 requests for 1 row of one token" in found.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--query-lens", "8"], "lens has 2 requests and q has 1"),
        (["--query-lens", "9,1"], "request 0 has q=9 tokens and max_q=8"),
        (["--query-lens", "8,-1"], "'-1' isn't accepted"),
        (["--query-lens", "8,1", "--rank", "2"], "rank=2 of world=2"),
        (["--query-lens", f"8,{10**20}"], f"'{10**20}' isn't accepted; accepted: whole numbers"),
        (["--query-lens", "8," + "9" * 5000], "accepted: whole numbers from 0 to 2147483647"),
        (["--query-lens", "8,1", "--interleave", str(2**62)], "Invalid value for '--interleave'"),
        (["--query-lens", "8,1", "--world", str(10**20)], "Invalid value for '--world'"),
        (["--query-lens", "8,1", "--world", "2147483647"], "accepted are up to 256 ranks"),
        (["--query-lens", "8,1", "--pad-rows", "2147483647"], "accepted are up to 1048576"),
    ],
)
def test_words_that_are_off_are_told(words, said):
    sizes = ["--total-lens", "301,97", "--max-query-len", "8", "--world", "2"]
    found = command_line("plan", "--decode", *sizes, *words)
    assert found.status == 2
    assert said in found.err


def test_the_largest_lengths_and_groups_are_planned():
    largest = 2**31 - 1
    group = ("--rank", "1", "--interleave", str(largest))
    found = plan(str(largest), "1", *group, max_query_len=largest, world=largest)
    assert found.status == 0
    assert rows_of(found)[0][-3:] == ["request 0", str(largest), "0"]


def test_help_is_that_of_decode():
    assert "--total-lens" in command_line("plan", "--decode", "--help").out
    assert "--total-lens" not in command_line("plan", "--help").out
    assert "plan --decode" in command_line("plan", "--help").out


def test_fixed_planners_that_disagree_are_told(monkeypatch):
    real = registry.find

    class Off:
        def run(self, inputs):
            right = real("torch-planner").run(inputs)
            return dataclasses.replace(right, bound=(right.bound[0] + 1, *right.bound[1:]))

    monkeypatch.setattr(
        registry, "find", lambda name: Off() if name == module.FIXED_AGAIN else real(name)
    )
    found = plan("9,5", "3,3", max_query_len=3)
    assert found.status == 1
    assert (
        "fixed: the planners jax-planner and torch-planner disagree about this batch"
        in lines_of(found)
    )


def test_a_wrong_fixed_plan_is_told(monkeypatch):
    real = registry.find

    class Short:
        def run(self, inputs):
            right = real("torch-planner").run(inputs)
            assert isinstance(right, DecodePlanResult)
            return dataclasses.replace(right, bound=tuple(max(right.bound) for _ in right.bound))

    monkeypatch.setattr(
        registry, "find", lambda name: Short() if name == module.FIXED else real(name)
    )
    found = plan("9", "3", max_query_len=3)
    assert found.status == 1
    assert "fixed: rows 0 to 1 of request 0 have bound 9; due: bounds 7, 8" in lines_of(found)
