"""DCP decode: written-out values, attention by loops, shards against the whole, special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch_ref.decode.problems import Problem, int32, random_problem, zero_query
from torch_ref import (
    dcp_decode,
    dcp_decode_oracle,
    merge_oracle,
    merge_states,
)

Run = Callable[..., tuple[Tensor, Tensor]]
SHARDS = [(1, 1), (2, 1), (2, 4), (3, 1), (4, 64), (8, 1), (8, 4)]


@pytest.fixture(params=["oracle", "torch"])
def run(request: pytest.FixtureRequest) -> Run:
    """One rank's out and lse by the oracle, or by the eager recipe."""
    function = {"oracle": dcp_decode_oracle, "torch": dcp_decode}[request.param]

    def outputs(problem: Problem, **shard: int) -> tuple[Tensor, Tensor]:
        result = function(**problem.shard(**shard))
        return result.out, result.lse

    return outputs


def oracles(problem: Problem, world: int, interleave: int, page: int = 64):
    return [
        dcp_decode_oracle(**problem.shard(rank, world, interleave, page)) for rank in range(world)
    ]


def all_ranks(run: Run, problem: Problem, world: int, interleave: int = 1):
    outs, lses = zip(
        *(run(problem, rank=r, world=world, interleave=interleave) for r in range(world)),
        strict=True,
    )
    return merge_states(outs, lses)


# What the formula is


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("world", "interleave"), SHARDS)
def test_every_rank_equals_attention_by_loops(world, interleave, causal):
    problem = random_problem([70, 9, 0, 3, 40], [5, 1, 0, 4, 2], padding=2, causal=causal)
    for rank in range(world):
        result = dcp_decode_oracle(**problem.shard(rank, world, interleave))
        out, lse = problem.by_loops(rank, world, interleave)
        torch.testing.assert_close(result.out, out, rtol=0, atol=1e-13)
        torch.testing.assert_close(result.lse, lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("page", [1, 2, 64])
def test_pages_of_any_size_give_one_result(page):
    problem = random_problem([70, 9], [3, 1])
    got = dcp_decode_oracle(**problem.shard(1, 2, page=page))
    want = dcp_decode_oracle(**problem.shard(1, 2, page=32))
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_p2_is_the_size_of_rounding_each_p():
    problem = random_problem([5], [1], heads=1)
    result = dcp_decode_oracle(**problem.shard())
    keys = problem.keys[0].double()
    p = torch.softmax(keys @ problem.q[0, 0].double() * problem.sm_scale, 0)
    want = math.sqrt(sum(float(p[k] ** 2 * keys[k, :512].square().sum()) for k in range(5)))
    assert result.p2.item() == pytest.approx(want, rel=1e-13)


def test_max_logits_is_the_largest_scaled_score_of_a_row():
    problem = random_problem([5, 0], [2, 1], heads=2)
    result = dcp_decode_oracle(**problem.shard())
    keys = problem.keys[0].double()
    for token, seen in ((0, 4), (1, 5)):
        z = problem.q[token].double() @ keys[:seen].mT * problem.sm_scale
        torch.testing.assert_close(result.max_logits[token], z.amax(-1), rtol=0, atol=1e-15)
    assert (result.max_logits[2] == -math.inf).all()


def test_random_batches_over_any_ranks_equal_one_rank():
    r = torch.Generator().manual_seed(51489)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=r))

    for seed in range(300):
        query_lens = [integer(0, 5) for _ in range(integer(1, 4))]
        totals = [max(0, q + integer(-2, 90)) for q in query_lens]
        problem = random_problem(totals, query_lens, padding=integer(0, 2), seed=seed)
        world, interleave = (1, 2, 3, 4, 8)[integer(0, 4)], (1, 2, 4, 64)[integer(0, 3)]
        whole = dcp_decode_oracle(**problem.shard())
        parts = merge_oracle(oracles(problem, world, interleave))
        torch.testing.assert_close(parts.out, whole.out, rtol=0, atol=1e-12)
        torch.testing.assert_close(parts.lse, whole.lse, rtol=0, atol=1e-12)
        torch.testing.assert_close(parts.p2, whole.p2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("totals", "query_lens"),
    [
        ([301, 97], [8, 8]),
        ([97], [8]),
        ([130], [4]),
        ([64], [1]),
        ([301, 97], [8, 1]),
        ([301, 97], [8, 2]),
        ([64, 130], [3, 1]),
        ([20, 9, 4], [6, 2, 1]),
        ([50, 60, 70], [1, 1, 8]),
        ([50, 60], [2, 2]),
    ],
)
def test_a_batch_equals_its_requests_and_tokens_alone(run, totals, query_lens):
    problem = random_problem(totals, query_lens)
    for rank in (0, 1):
        out, lse = run(problem, rank=rank, world=2)
        t = 0
        for b, count in enumerate(query_lens):
            for j in range(count):
                later = count - 1 - j
                alone = Problem(problem.q[t : t + 1], [problem.keys[b][: totals[b] - later]], [1])
                one_out, one_lse = run(alone, rank=rank, world=2)
                torch.testing.assert_close(out[t : t + 1], one_out, rtol=2**-8, atol=1e-6)
                torch.testing.assert_close(lse[t : t + 1], one_lse, rtol=1e-6, atol=1e-6)
                t += 1


@pytest.mark.parametrize("padding", [6, 8])
def test_padded_rows_and_requests_change_no_other_row(run, padding):
    # 8 + 2 and 6 rows of padding; 8 + 0 + 8 and 8
    lens = {6: ([301, 97], [8, 2]), 8: ([301, 0, 97], [8, 0, 8])}[padding]
    plain = random_problem(*lens)
    padded = plain.but(q=torch.cat([plain.q, torch.full((padding, 2, 576), math.nan).bfloat16()]))
    out, lse = run(plain, rank=1, world=2)
    padded_out, padded_lse = run(padded, rank=1, world=2)
    assert torch.equal(padded_out[:-padding], out) and torch.equal(padded_lse[:-padding], lse)
    assert (padded_out[-padding:] == 0).all() and (padded_lse[-padding:] == -math.inf).all()


# What its special values are


def test_a_prompt_shorter_than_the_world(run):
    # vllm-project/vllm#38416
    problem = zero_query([[3.0, 6.0, 9.0]], [1])
    for rank in range(3, 8):
        out, lse = run(problem, rank=rank, world=8)
        assert (out == 0).all() and lse.item() == -math.inf
    merged = all_ranks(run, problem, 8)
    assert merged.out.unique().tolist() == pytest.approx([6.0], abs=1e-6)
    assert merged.lse.item() == pytest.approx(1.098612, abs=1e-6)


def test_unequal_ranks_are_weighed_by_their_keys(run):
    # vllm-project/vllm#47079: one rank with 8 keys of value 1, one with a key of value 10
    problem = zero_query([[1.0] * 8 + [10.0]], [1])
    out, lse = run(problem, rank=0, world=2, interleave=8)
    assert lse.item() == pytest.approx(math.log(8.0), rel=1e-6) and (out == 1).all()
    out, lse = run(problem, rank=1, world=2, interleave=8)
    assert lse.item() == 0.0 and (out == 10).all()
    merged = all_ranks(run, problem, 2, 8)
    assert merged.out.unique().tolist() == pytest.approx([2.0], abs=1e-6)
    assert merged.lse.item() == pytest.approx(2.197225, abs=1e-6)


@pytest.mark.parametrize("filler", [math.nan, math.inf])
def test_slots_past_a_length_are_not_seen(run, filler):
    # flashinfer-ai/flashinfer#941: page 64, 70 keys, 58 slots of the second page unfilled
    problem = zero_query([[1.0] * 70], [1])
    shard = problem.shard()
    shard["kv_cache"] = shard["kv_cache"].nan_to_num(nan=filler)
    result = dcp_decode_oracle(**shard), dcp_decode(**shard)
    for r in result:
        assert (r.out == 1).all()
        assert r.lse.item() == pytest.approx(4.248495, abs=1e-6)
    keys = problem.keys[0].clone()
    keys[3] = math.nan
    out, lse = run(problem.but(keys=[keys]))
    assert out.isnan().all() and lse.isnan().all()


def test_a_draft_block_of_65_keys_masks_its_tail(run):
    # flashinfer-ai/flashinfer#3716: wrong 0.507812 with a tile of 128
    problem = zero_query([[1.0] * 65], [2]).but(causal=False)
    out, lse = run(problem)
    assert (out == 1).all()
    assert lse.flatten().tolist() == pytest.approx([4.174387] * 2, abs=1e-6)


def test_a_padded_row_keeps_the_batchs_largest_value_finite(run):
    # vllm-project/vllm#57094: a request with seq_len 0 beside three real ones
    problem = random_problem([5, 6, 7, 0], [1, 1, 1, 1])
    out, lse = run(problem)
    assert (out[3] == 0).all() and (lse[3] == -math.inf).all()
    assert math.isfinite(out.abs().max().item())


def test_as_many_tokens_as_keys(run):
    problem = zero_query([[4.0, 8.0, 12.0]], [3])
    out, lse = run(problem)
    assert out[:, 0, 0].tolist() == pytest.approx([4.0, 6.0, 8.0])
    assert lse[:, 0].tolist() == pytest.approx([0.0, math.log(2), math.log(3)], abs=1e-6)
    out, lse = run(problem, rank=1, world=2)
    assert out[:, 0, 0].tolist() == [0.0, 8.0, 8.0]
    assert lse[:, 0].tolist() == [-math.inf, 0.0, 0.0]


def test_fewer_keys_than_tokens(run):
    out, lse = run(zero_query([[4.0]], [4]))
    assert out[:, 0, 0].tolist() == [0.0, 0.0, 0.0, 4.0]
    assert lse[:, 0].tolist() == [-math.inf, -math.inf, -math.inf, 0.0]


def test_a_bound_of_one_over_a_shard_of_2048_keys(run):
    problem = zero_query([[2.0] * 4096], [1])
    for rank, lse_there in ((0, 0.0), (1, -math.inf)):
        shard = problem.shard(rank, 2)
        shard["total_lens"] = int32([1])
        for function in (dcp_decode_oracle, dcp_decode):
            assert function(**shard).lse.item() == lse_there


@pytest.mark.parametrize("query_lens", [[0, 0], []])
def test_nothing_but_padding(run, query_lens):
    problem = random_problem([0] * len(query_lens), query_lens, padding=3)
    out, lse = run(problem, rank=1, world=2)
    assert (out == 0).all() and (lse == -math.inf).all() and out.shape == (3, 2, 512)
    merged = all_ranks(run, problem, 2)
    assert (merged.out == 0).all() and (merged.lse == -math.inf).all()


def test_a_nan_reaches_the_rows_that_see_it_and_no_others(run):
    problem = random_problem([40, 12], [4, 2], heads=2)
    clean_out, clean_lse = run(problem)
    keys = [k.clone() for k in problem.keys]
    keys[0][38, 575] = math.nan  # rope only; bounds of request 0 are 37 to 40
    q = problem.q.clone()
    q[4, 1, 0] = math.nan
    out, lse = run(problem.but(keys=keys, q=q))
    poisoned = torch.zeros(6, 2, dtype=torch.bool)
    poisoned[2:4] = True
    poisoned[4, 1] = True
    assert torch.equal(lse.isnan(), poisoned)
    assert torch.equal(out.isnan(), poisoned[..., None].expand_as(out))
    assert torch.equal(out[~poisoned], clean_out[~poisoned])
    assert torch.equal(lse[~poisoned], clean_lse[~poisoned])


def test_a_nan_query_without_keys_is_an_empty_row(run):
    problem = random_problem([0, 5], [1, 1])
    out, lse = run(problem.but(q=torch.full_like(problem.q, math.nan)))
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all() and lse[1].isnan().all()


@pytest.mark.parametrize(("sm_scale", "lse"), [(0.0, math.log(2)), (-0.125, 0.018150)])
def test_scales_of_any_sign(run, sm_scale, lse):
    keys = torch.zeros(2, 576)
    keys[0, 0], keys[:, 1] = 32.0, torch.tensor([1.0, 3.0])
    q = torch.zeros(1, 1, 576).bfloat16()
    q[..., 0] = 1.0
    out, got = run(Problem(q, [keys.bfloat16()], [1], sm_scale=sm_scale))
    assert got.item() == pytest.approx(lse, abs=1e-5)
    first = {0.0: 0.5, -0.125: math.exp(-4.018150)}[sm_scale]
    assert out[0, 0, 1].item() == pytest.approx(first + 3 * (1 - first), rel=4e-3)


def test_scores_in_the_thousands_pick_one_key(run):
    keys = torch.zeros(3, 576)
    keys[:, 0], keys[:, 1] = torch.tensor([-1e4, 1e4, 9.9e3]), torch.tensor([1.0, 2.0, 3.0])
    q = torch.zeros(1, 1, 576).bfloat16()
    q[..., 0] = 1.0
    out, lse = run(Problem(q, [keys.bfloat16()], [1], sm_scale=1.0))
    assert out[0, 0, 1].item() == 2.0
    assert lse.item() == keys.bfloat16()[1, 0].item()


def test_rope_columns_take_part_in_scores_and_not_in_values(run):
    keys = torch.zeros(2, 576)
    keys[:, 512], keys[:, 511] = torch.tensor([0.0, math.log(3.0)]), torch.tensor([0.0, 4.0])
    q = torch.zeros(1, 1, 576).bfloat16()
    q[..., 512] = 1.0
    out, lse = run(Problem(q, [keys.bfloat16()], [1], sm_scale=1.0))
    assert out.shape[-1] == 512
    assert out[0, 0, 511].item() == pytest.approx(3.0, rel=4e-3)
    assert lse.item() == pytest.approx(math.log(4.0), rel=2e-3)


# Float8


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_float8_is_what_it_dequantises_to(q_dtype):
    problem = random_problem([70, 9], [3, 1], dtype=torch.float8_e4m3fn)
    problem = problem.but(q=problem.q.to(q_dtype))
    q_scale = None if q_dtype == torch.bfloat16 else 0.25
    wide = problem.but(
        q=(problem.q.float() * (q_scale or 1.0)).bfloat16(),
        keys=[(keys.float() * 0.5).bfloat16() for keys in problem.keys],  # exact: powers of two
    )
    scales: dict[str, Any] = {"kv_scale": 0.5, "q_scale": q_scale}
    got = dcp_decode_oracle(**problem.shard(1, 2), **scales)
    want = dcp_decode_oracle(**wide.shard(1, 2))
    for name in ("out", "lse", "p2"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=1e-13)
    eager = dcp_decode(**problem.shard(1, 2), **scales)
    torch.testing.assert_close(eager.out, dcp_decode(**wide.shard(1, 2)).out)


def test_a_scale_may_be_a_tensor_of_one_number():
    problem = random_problem([9], [1], dtype=torch.float8_e4m3fn)
    got = dcp_decode(**problem.shard(), kv_scale=torch.tensor(0.5))
    assert torch.equal(got.out, dcp_decode(**problem.shard(), kv_scale=0.5).out)


# The eager recipe


def test_the_recipe_is_off_by_the_rounding_of_p_and_out():
    problem = random_problem([900], [4], heads=8)
    want = dcp_decode_oracle(**problem.shard())
    for dtype, size in ((torch.bfloat16, 2**-8), (torch.float32, 0.0)):
        got = dcp_decode(**problem.shard(), out_dtype=dtype)
        assert got.out.dtype == dtype and got.lse.dtype == torch.float32
        error = torch.linalg.vector_norm(got.out - want.out, dim=-1)
        allowed = 2**-8 * want.p2 + size * torch.linalg.vector_norm(want.out, dim=-1)
        assert (error < allowed).all()
        assert (error > 2**-12 * want.p2).all()  # P is rounded: in fp32 it would be 2**-20
        torch.testing.assert_close(got.lse.double(), want.lse, rtol=0, atol=2e-6)


def test_products_of_the_recipe_are_fp32():
    # jax-ml/jax#23182: as TF32 the 2^-11 would be gone and the score 576
    keys = torch.ones(1, 576).bfloat16()
    q = torch.full((1, 1, 576), 1.0).bfloat16()
    q[..., 0] = 2**-9
    lse = dcp_decode(**Problem(q, [keys], [1], sm_scale=1.0).shard()).lse.item()
    assert lse == 575 + 2**-9


def test_merged_recipes_of_all_ranks_equal_one_rank():
    problem = random_problem([301, 97], [8, 2], heads=4)
    whole = dcp_decode(**problem.shard(), out_dtype=torch.float32)
    for world, interleave in SHARDS[1:]:
        ranks = [
            dcp_decode(**problem.shard(rank, world, interleave), out_dtype=torch.float32)
            for rank in range(world)
        ]
        merged = merge_states([r.out for r in ranks], [r.lse for r in ranks])
        torch.testing.assert_close(merged.lse, whole.lse, rtol=0, atol=5e-6)
        error = torch.linalg.vector_norm(merged.out - whole.out, dim=-1)
        assert (error < 2**-7 * torch.linalg.vector_norm(whole.out, dim=-1)).all()


# Rows and devices


@pytest.mark.parametrize("function", [dcp_decode_oracle, dcp_decode])
def test_rows_can_be_chosen_in_any_order(function):
    shard = random_problem([40, 12], [4, 2], padding=1).shard(1, 2)
    every, some = function(**shard), function(**shard, rows=[6, 5, 0, 5, 2])
    for name in vars(every):
        got, want = getattr(some, name), getattr(every, name)[[6, 5, 0, 5, 2]]
        torch.testing.assert_close(got, want)
    assert function(**shard, rows=[], device="cpu").out.shape == (0, 2, 512)
    with pytest.raises(ValueError, match=r"^rows: 7; accepted are rows 0 to 6"):
        function(**shard, rows=[7])
