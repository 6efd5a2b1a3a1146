"""Each deviation of the decode oracle gives the wrong value that its fault is known for."""

from __future__ import annotations

import math

import pytest
import torch

from tests.torch_ref.decode.problems import Problem, int32, random_problem, zero_query
from torch_ref import DecodeVariant, dcp_decode_oracle, merge_states
from torch_ref.decode.inputs import check_decode_inputs
from torch_ref.decode.variants import CONTRACT


def oracle(problem: Problem, shard: tuple[int, ...] = (), **deviation):
    return dcp_decode_oracle(**problem.shard(*shard), variant=DecodeVariant(**deviation))


def seen(result) -> list[int]:
    """How many keys each row of a zero query saw."""
    return torch.exp(result.lse[:, 0]).round().int().tolist()


def same_but(got, want, *names: str) -> None:
    """Only the named results moved."""
    for name in ("out", "lse", "p2"):
        equal = torch.equal(getattr(got, name), getattr(want, name))
        assert equal == (name not in names), name


def test_the_default_is_the_contract():
    problem = random_problem([70, 9], [5, 1], padding=1)
    same_but(oracle(problem, (1, 2, 4)), dcp_decode_oracle(**problem.shard(1, 2, 4)))
    assert DecodeVariant() == CONTRACT


@pytest.mark.parametrize(
    ("bound", "counts"),
    [
        ("right", [2, 3, 3, 4]),  # bounds 4 5 6 7; rank 0 of 2 holds positions 0 2 4 6
        ("total", [4, 4, 4, 4]),
        ("plus_one", [3, 3, 4, 4]),
        ("minus_one", [2, 2, 3, 3]),
        ("after_localising", [1, 2, 3, 4]),
    ],
)
def test_bounds(bound, counts):
    assert seen(oracle(zero_query([[1.0] * 7], [4]), (0, 2), bound=bound)) == counts


def test_every_row_bounded_at_its_total_is_far_off():
    problem = random_problem([301], [8], heads=16)
    got, want = oracle(problem, (0, 2), bound="total"), oracle(problem, (0, 2))
    assert (got.out - want.out).abs().max() > 0.1
    same_but(oracle(problem.but(causal=False), bound="total"), oracle(problem.but(causal=False)))


def test_8_and_2_viewed_as_5_and_5():
    problem = zero_query([[1.0] * 30, [1.0] * 20], [8, 2])
    got = oracle(problem, view="uniform")
    assert seen(oracle(problem)) == [23, 24, 25, 26, 27, 28, 29, 30, 19, 20]
    assert seen(got) == [26, 27, 28, 29, 30, 16, 17, 18, 19, 20]


def test_the_shipped_view_of_padding():
    problem = zero_query([[1.0] * 30, [1.0] * 20], [8, 2])
    padded = problem.but(q=torch.zeros(16, 1, 576).bfloat16())
    got = oracle(padded, view="uniform")
    assert seen(got) == [23, 24, 25, 26, 27, 28, 29, 30, 13, 14] + [0] * 6
    assert (got.lse[10:] == -math.inf).all()


def test_a_batch_that_has_no_shipped_view_is_left_alone():
    problem = random_problem([30, 20], [8, 1])
    same_but(oracle(problem, view="uniform"), oracle(problem))


def test_rows_given_an_idle_request_read_none_of_its_stale_pages():
    shard = zero_query([[1.0] * 30, [1.0] * 20, [1.0] * 30], [8, 0, 8]).shard()
    shard["block_table"][1] = -7
    shard["q"] = torch.zeros(24, 1, 576).bfloat16()
    got = dcp_decode_oracle(**shard, variant=DecodeVariant(view="uniform"))
    assert seen(got)[8:16] == [0] * 8


def test_a_mask_of_another_interleave_or_rank():
    problem = zero_query([[1.0] * 9], [1])
    shard = problem.shard(0, 2, 4)  # positions 0 1 2 3 8
    shard["total_lens"] = int32([6])
    for variant, count in (
        (CONTRACT, 4),
        (DecodeVariant(mask_interleave=1), 3),
        (DecodeVariant(mask_rank=1), 2),
    ):
        assert seen(dcp_decode_oracle(**shard, variant=variant)) == [count]


def test_a_neighbours_keys():
    problem = zero_query([[1.0] * 9, [5.0] * 4], [2, 1])
    got = oracle(problem, request_shift=1)
    assert got.out[:, 0, 0].tolist() == [5.0, 5.0, 1.0]
    assert seen(got) == [3, 4, 9]


def test_scale_twice():
    problem = random_problem([30], [2])
    twice = oracle(problem.but(sm_scale=0.3), scale_power=2)
    same_but(twice, oracle(problem.but(sm_scale=0.3**2)))


def test_scale_of_keys_and_values():
    problem = random_problem([30], [2], dtype=torch.float8_e4m3fn)
    shard = problem.shard()

    def scaled(**deviation):
        return dcp_decode_oracle(**shard, kv_scale=0.5, variant=DecodeVariant(**deviation))

    right, unscaled = scaled(), dcp_decode_oracle(**shard)
    same_but(scaled(kv_scale="ignored"), unscaled)
    keys_only, values_only = scaled(kv_scale="keys_only"), scaled(kv_scale="values_only")
    torch.testing.assert_close(keys_only.out, right.out * 2)
    same_but(keys_only, right, "out", "p2")
    torch.testing.assert_close(values_only.out, unscaled.out / 2)
    same_but(values_only, unscaled, "out", "p2")


def test_scale_of_queries_ignored():
    problem = random_problem([30], [2], dtype=torch.float8_e4m3fn)
    shard = problem.shard() | {"q": problem.q.to(torch.float8_e4m3fn)}
    ignored = dcp_decode_oracle(**shard, q_scale=0.25, variant=DecodeVariant(q_scale="ignored"))
    same_but(ignored, dcp_decode_oracle(**shard))
    same_but(ignored, dcp_decode_oracle(**shard, q_scale=0.25), "out", "lse", "p2")


def test_value_columns():
    problem = random_problem([5], [1], heads=1)
    got = oracle(problem, v_offset=64)
    keys = problem.keys[0].double()
    p = torch.softmax(keys @ problem.q[0, 0].double() * problem.sm_scale, 0)
    torch.testing.assert_close(got.out[0, 0], p @ keys[:, 64:])
    same_but(got, oracle(problem), "out", "p2")


def test_heads_shifted():
    problem = random_problem([5], [2], heads=3)
    got, want = oracle(problem, head_shift=1), oracle(problem)
    torch.testing.assert_close(got.out[:, 1], want.out[:, 0])
    torch.testing.assert_close(got.lse[:, 0], want.lse[:, 2])


def test_lse_in_base_2():
    problem = zero_query([[1.0] * 8, []], [1, 1])
    got = oracle(problem, lse_base2=True)
    assert got.lse.flatten().tolist() == [pytest.approx(3.0), -math.inf]


@pytest.mark.parametrize(("word", "value"), [("0", 0.0), ("+inf", math.inf), ("-inf", -math.inf)])
def test_lse_of_an_empty_rank(word, value):
    problem = zero_query([[3.0]], [1])
    padded = problem.but(q=torch.zeros(2, 1, 576).bfloat16())
    got = oracle(padded, (1, 2), empty_lse=word)
    assert got.lse.flatten().tolist() == [value, -math.inf]  # padding is not a rank's to say


def test_an_empty_ranks_lse_taken_as_0_pulls_the_merge_down():
    # vllm-project/vllm#38416: right 6.0
    problem = zero_query([[3.0, 6.0, 9.0]], [1])
    ranks = [oracle(problem, (rank, 8), empty_lse="0") for rank in range(8)]
    merged = merge_states([r.out for r in ranks], [r.lse for r in ranks])
    assert merged.out.unique().tolist() == pytest.approx([2.25])


def test_lse_read_in_another_layout():
    # vllm-project/vllm#46145: B = 2, H = 3, S = 2; lse [b, h, s] is 100 b + 10 h + s
    lse = torch.tensor([[0, 10, 20], [1, 11, 21], [100, 110, 120], [101, 111, 121]]).double()
    inputs = random_problem([5, 5], [2, 2], heads=3)
    _, got, _ = DecodeVariant(lse_layout="reshaped").change_outputs(
        check_decode_inputs(**inputs.shard()),
        torch.zeros(4, 1, dtype=torch.bool),
        torch.zeros(4, 3, 512),
        lse,
        lse,
    )
    assert got.tolist() == [[0, 1, 10], [11, 20, 21], [100, 101, 110], [111, 120, 121]]


def test_a_draft_block_has_no_other_view():
    problem = random_problem([20, 9], [4, 2], causal=False)
    assert torch.equal(oracle(problem, view="uniform").lse, oracle(problem).lse)


@pytest.mark.parametrize(("heads", "query_lens"), [(1, [3, 2]), (3, [1, 0, 2]), (1, [1])])
def test_lse_of_one_token_one_head_or_no_token_in_another_layout(heads, query_lens):
    problem = random_problem([9] * len(query_lens), query_lens, heads=heads)
    right, got = oracle(problem), oracle(problem, lse_layout="reshaped")
    assert torch.equal(got.lse[:1], right.lse[:1])
    assert torch.equal(got.lse.flatten().sort().values, right.lse.flatten().sort().values)


def test_rows_can_be_chosen_where_a_deviation_moves_them():
    problem = random_problem([20, 9], [4, 1], heads=3)
    variant = DecodeVariant(lse_layout="reshaped")
    every = dcp_decode_oracle(**problem.shard(), variant=variant)
    some = dcp_decode_oracle(**problem.shard(), variant=variant, rows=[3, 1])
    assert torch.equal(some.lse, every.lse[[3, 1]])
    assert not torch.equal(every.lse, dcp_decode_oracle(**problem.shard()).lse)
