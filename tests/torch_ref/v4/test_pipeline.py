"""The chunked pipeline: its stages bit for bit, its answers, and the plans that it refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.torch_ref.v4.problems import V4Problem, answer, int32, v4_problem
from torch_ref import flat_v4_call, sparse_prefill, v4_prefill
from torch_ref.planning import PrefillChunk, Rules, plan_prefill_chunks

MIXED = [0, 40, 33, 33, 9, 300, 129, 17, 64], [0, 5, 0, 1, 9, 20, 3, 0, 0]


def alone(problem: V4Problem, slack: int = 0) -> list[PrefillChunk]:
    """Each request with query tokens in a chunk of its own, with some rows to spare."""
    seq, starts = (problem.arguments[k].tolist() for k in ("seq_lens", "query_start_loc"))
    chunks = []
    for i, length in enumerate(seq):
        q = starts[i + 1] - starts[i]
        if q:
            N = len(problem.entries[i]) + slack
            G = q + min(length - q, problem.arguments["window"] - 1) + slack
            start = starts[i] - starts[0]
            chunks.append(PrefillChunk(i, i + 1, N, N + G, start, start + q))
    return chunks


def check_stages(problem: V4Problem, result: Any) -> None:
    """Every gathered row holds its token, no other was written, every list names its keys."""
    ratio, window = problem.arguments["compress_ratio"], problem.arguments["window"]
    seq, starts = (problem.arguments[k].tolist() for k in ("seq_lens", "query_start_loc"))
    assert len(result.stages) == len(result.plan)
    for chunk, stage in zip(result.plan, result.stages, strict=True):
        N, M = chunk.compressed_rows, chunk.workspace_rows
        assert stage.workspace.shape == (chunk.end - chunk.start, M, 512)
        for b, i in enumerate(range(chunk.start, chunk.end)):
            q = starts[i + 1] - starts[i]
            rows = torch.full((M, 512), torch.nan, dtype=torch.bfloat16)
            for c in range(seq[i] // ratio if len(problem.entries[i]) else 0):
                rows[c] = problem.entries[i][c]
            gathered = q + min(seq[i] - q, window - 1)
            for k in range(gathered):
                rows[N + k] = problem.positions[i][seq[i] - gathered + k]
            same = stage.workspace[b].view(torch.int16) == rows.view(torch.int16)
            assert bool((same | (stage.workspace[b].isnan() & rows.isnan())).all())
        flat = stage.workspace.flatten(0, 1)
        for t in range(chunk.query_start, chunk.query_end):
            row, length = stage.indices[t - chunk.query_start], stage.lengths[t - chunk.query_start]
            assert torch.equal(flat[row[:length].long()], problem.keys(t))
            assert bool((row[length:] == -1).all())


def check_answer(problem: V4Problem, result: Any) -> None:
    out, max_logits, lse = answer(problem)
    # P and the output are rounded to bf16: 2^-8 of a value below 4 or so.
    torch.testing.assert_close(result.out.double(), out, rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(result.max_logits.double(), max_logits, rtol=0, atol=2e-6)
    torch.testing.assert_close(result.lse.double(), lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("ratio", "topk"), [(1, 0), (2, 8), (4, 4), (4, 120), (128, 3)])
@pytest.mark.parametrize("kv_format", ["v4-fp8", "bf16"])
@pytest.mark.parametrize("rules", ["fixed", "vllm-0.33.0"])
def test_a_mixed_batch_has_right_stages_and_answers(ratio, topk, kv_format, rules):
    problem = v4_problem(*MIXED, ratio=ratio, topk=topk, kv_format=kv_format, offset=11, heads=3)
    result = v4_prefill(**problem.everything, rules=rules, keep_stages=True)
    assert len(result.plan) > 1
    check_stages(problem, result)
    check_answer(problem, result)


@pytest.mark.parametrize("window", [1, 8, 128])
@pytest.mark.parametrize("page", [1, 3, 64])
def test_windows_and_pages_that_straddle(window, page):
    problem = v4_problem(
        [3, 4, 127, 128, 129, 300], [3, 1, 1, 2, 3, 1], window=window, page=page, compressed_page=2
    )
    result = v4_prefill(**problem.everything, keep_stages=True)
    check_stages(problem, result)
    check_answer(problem, result)


def test_images_are_seen_both_ways():
    images = [[], [(36, 39)], [], [(32, 32)], [(2, 6), (5, 7)], [(281, 299)], [(126, 128)], [], []]
    problem = v4_problem(*MIXED, images=images, max_image=19)
    result = v4_prefill(**problem.everything, keep_stages=True)
    check_stages(problem, result)
    check_answer(problem, result)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_under_several_plans_give_their_keys_and_answers(seed):
    pick = random.Random(seed)
    seq, q = [], []
    for _ in range(pick.randint(1, 7)):
        count = pick.choice([0, 0, 1, 2, pick.randint(1, 30)])
        q.append(count)
        seq.append(count + pick.choice([0, 1, 7, 8, pick.randint(0, 200)]))
    problem = v4_problem(
        seq,
        q,
        ratio=pick.choice([2, 4, 128]),
        topk=pick.choice([1, 4, 16]),
        page=pick.choice([1, 5, 64]),
        window=pick.choice([1, 8, 128]),
        chunk_size=pick.choice([1, 2, 4]),
        seed=seed,
    )
    bound = [s + pick.randint(0, 9) for s in seq]
    lenient = {**problem.everything, "max_model_len": max(bound) + 1}
    results = [
        v4_prefill(**problem.everything, keep_stages=True),
        v4_prefill(**problem.everything, keep_stages=True, rules="vllm-0.33.0"),
        v4_prefill(**problem.everything, keep_stages=True, plan=alone(problem)),
        v4_prefill(**lenient, keep_stages=True, seq_lens_bound=bound),
    ]
    for result in results:
        check_stages(problem, result)
        check_answer(problem, result)


def test_known_rows_of_two_requests_in_one_chunk():
    # vllm#41834: N = 5, M = 14, and global offsets.
    problem = v4_problem([6, 21], [3, 2], offset=7, chunk_size=4)
    lists = int32([[0, -1, -1, -1]] * 3 + [[0, 1, 2, 3]] * 2)
    result = v4_prefill(**problem.but(topk_indices=lists).everything, keep_stages=True)
    assert result.plan == (PrefillChunk(0, 2, 5, 14, 0, 5),)
    assert result.stages is not None
    (stage,) = result.stages
    assert stage.lengths.tolist() == [5, 6, 7, 12, 12]
    assert stage.indices[3, :12].tolist() == [14, 15, 16, 17, *range(19, 27)]
    assert stage.indices[2, :7].tolist() == [0, *range(5, 11)]


def test_a_prompt_in_three_steps_is_the_prompt_in_one():
    whole = v4_problem([300], [300], ratio=4, window=128, page=64, heads=1)
    a = whole.arguments
    want = v4_prefill(**whole.everything)
    for step in (100, 200, 300):
        rows = slice(step - 100, step)
        part = whole.but(
            q=a["q"][rows],
            topk_indices=a["topk_indices"][rows],
            query_start_loc=int32([0, 100]),
            seq_lens=int32([step]),
        )
        got = v4_prefill(**part.everything)
        torch.testing.assert_close(got.out, want.out[rows], rtol=2**-7, atol=2**-8)
        torch.testing.assert_close(got.lse, want.lse[rows], rtol=0, atol=2e-6)


def test_a_request_whose_keys_are_still_loading_poisons_nobody():
    problem = v4_problem([40, 64, 30], [5, 0, 4], chunk_size=4)
    a = problem.arguments
    swa, compressed = a["swa_cache"].clone(), a["compressed_cache"].clone()
    swa[a["swa_block_table"][1, : 64 // a["swa_page"]].long()] = 0xFF
    compressed[a["compressed_block_table"][1, :1].long()] = 0xFF
    loading = problem.but(swa_cache=swa, compressed_cache=compressed)
    result = v4_prefill(**loading.everything, keep_stages=True)
    assert [(c.start, c.end) for c in result.plan] == [(0, 3)]
    assert result.stages is not None and result.stages[0].workspace[1].isnan().all()
    check_answer(problem, result)


def recorder(calls: list[tuple[int, ...]]) -> Any:
    def attend(q, kv, indices, sm_scale, *, attn_sink, topk_length):
        calls.append((len(q), len(kv), *indices.shape, len(topk_length)))
        return sparse_prefill(
            q, kv, indices, sm_scale, attn_sink=attn_sink, topk_length=topk_length
        )

    return attend


@pytest.mark.parametrize("q", [[], [0], [0, 0, 0]])
def test_without_query_tokens_nothing_is_launched(q):
    problem, calls = v4_problem([40] * len(q), q), []
    result = v4_prefill(**problem.everything, attend=recorder(calls))
    assert calls == [] and result.plan == ()
    assert result.out.shape == (0, 2, 512) and result.lse.shape == (0, 2)


def test_the_shipped_rules_attend_with_no_tokens_and_the_fixed_ones_never_do():
    # vllm#49059: FlashMLA's kernel aborts on the empty call.
    problem = v4_problem([40, 40, 16, 64, 0], [0, 5, 0, 3, 0], chunk_size=1, max_model_len=64)
    limits = {**problem.everything, "max_num_batched_tokens": 16}
    calls: dict[Rules, list[tuple[int, ...]]] = {"fixed": [], "vllm-0.33.0": []}
    for rules, made in calls.items():
        result = v4_prefill(**limits, rules=rules, attend=recorder(made), keep_stages=True)
        check_stages(problem, result)
        check_answer(problem, result)
    assert calls["fixed"] == [(5, 22, 5, 128, 5), (3, 26, 3, 128, 3)]
    assert [made[0] for made in calls["vllm-0.33.0"]] == [0, 5, 0, 3, 0]


def test_bounds_above_the_lengths_size_the_workspace():
    problem = v4_problem([21], [2], max_model_len=64)
    result = v4_prefill(**problem.everything, seq_lens_bound=int32([29]), keep_stages=True)
    assert result.plan == (PrefillChunk(0, 1, 7, 16, 0, 2),)
    check_stages(problem, result)
    check_answer(problem, result)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ([20], "seq_lens_bound: 20 for request 0 of 21 tokens; accepted are 21 and more"),
        ([21, 3], "seq_lens_bound: 2 requests; seq_lens has 1"),
        (torch.tensor([21.0]), "seq_lens_bound: torch.float32 [1]; accepted are 1 whole numbers"),
    ],
)
def test_bounds_below_the_lengths_are_refused(bound, message):
    with pytest.raises(ValueError) as error:
        v4_prefill(**v4_problem([21], [2]).everything, seq_lens_bound=bound)
    assert str(error.value).startswith(message)


def test_a_request_larger_than_the_workspace_is_said():
    problem = v4_problem([400], [9], chunk_size=1, max_model_len=16)
    with pytest.raises(
        ValueError, match=r"^plan: chunk 0 of requests \[0, 1\) takes 116 workspace"
    ):
        v4_prefill(**problem.everything)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "plan: request 0 with 3 query tokens is in no chunk"),
        ([(0, 2, 5, 14, 0, 5)], "plan: request 3 with 1 query tokens is in no chunk"),
        ([(1, 4, 5, 14, 3, 6)], "plan: request 0 with 3 query tokens is in no chunk"),
        ([(0, 2, 5, 14, 0, 5), (1, 4, 7, 16, 3, 6)], "plan: chunk 1 takes requests [1, 4); accep"),
        ([(0, 5, 7, 16, 0, 6)], "plan: chunk 0 takes requests [0, 5); accepted is a range in"),
        ([(2, 2, 7, 16, 5, 5), (0, 4, 7, 16, 0, 6)], "plan: chunk 0 takes requests [2, 2)"),
        ([(0, 4, 7, 16, 0, 5)], "plan: chunk 0 takes tokens [0, 5); those of requests [0, 4) are"),
        ([(0, 4, 4, 16, 0, 6)], "plan: chunk 0 has 4 compressed and 12 other rows for each"),
        ([(0, 2, 5, 13, 0, 5), (3, 4, 1, 8, 5, 6)], "plan: chunk 0 has 5 compressed and 8 other"),
        ([(0, 4, 5, 14, 0, 6)], "plan: chunk 0 has 5 compressed and 9 other rows for each"),
        ([(0, 4, 7.0, 16, 0, 6)], "plan: compressed_rows of chunk 0: 7.0; accepted are whole num"),
        ([(0, 4, 7, 16, False, 6)], "plan: query_start of chunk 0: False; accepted are 0 and more"),
        ([(0, 4, 90, 99, 0, 6)], "plan: chunk 0 of requests [0, 4) takes 396 workspace rows; the"),
    ],
)
def test_plans_that_cannot_be_run_are_refused(chunks, message):
    # Request 2 without query tokens would gather 7 entries and 7 positions if it were in a chunk.
    problem = v4_problem([6, 21, 30, 5], [3, 2, 0, 1])
    plan = [PrefillChunk(*chunk) for chunk in chunks]
    with pytest.raises(ValueError) as error:
        v4_prefill(**problem.everything, plan=plan)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("plan", [7, [(0, 1, 5, 14, 0, 2)]])
def test_a_plan_that_is_none_is_refused(plan):
    with pytest.raises(ValueError, match=r"^plan: .*; accepted is a sequence of PrefillChunk"):
        v4_prefill(**v4_problem([21], [2]).everything, plan=plan)


@pytest.mark.parametrize("name", ["window", "max_image_tokens"])
def test_a_list_wider_than_int32_is_refused_before_anything_is_planned(name):
    problem = v4_problem([21], [2]).but(**{name: 2**31 - 1})
    with pytest.raises(ValueError, match=rf"^{name}: lists would be .* accepted are 2147483520"):
        v4_prefill(**problem.everything)


def test_the_workspace_may_be_filled_to_its_last_row():
    problem = v4_problem([21], [2], chunk_size=1)
    area = 6 + 8 + 2  # entries, window and tokens at their most
    v4_prefill(**problem.everything, plan=[PrefillChunk(0, 1, 5, area, 0, 2)])
    with pytest.raises(ValueError, match=r"takes 17 workspace rows; the workspace that .* has 16$"):
        v4_prefill(**problem.everything, plan=[PrefillChunk(0, 1, 5, area + 1, 0, 2)])


def test_a_plan_of_ones_own_is_run_as_given():
    problem = v4_problem([6, 21, 30, 5], [3, 2, 0, 1], chunk_size=4)
    plan = alone(problem, slack=2)
    result = v4_prefill(**problem.everything, plan=plan, keep_stages=True)
    assert result.plan == tuple(plan) and len(plan) == 3
    check_stages(problem, result)
    check_answer(problem, result)
    one = v4_prefill(**problem.everything)
    assert one.plan == plan_prefill_chunks(
        [6, 21, 30, 5], [3, 2, 0, 1], compress_ratio=4, window=8, **problem.limits
    )
    assert one.stages is None


@pytest.mark.parametrize("kv_format", ["v4-fp8", "bf16"])
def test_requests_alone_have_the_keys_they_have_in_the_batch(kv_format):
    problem = v4_problem(*MIXED, kv_format=kv_format)
    a = problem.arguments
    kv, indices, lengths = flat_v4_call(**a)
    batch = v4_prefill(**problem.everything)
    starts = a["query_start_loc"].tolist()
    for i in range(len(starts) - 1):
        rows = slice(starts[i], starts[i + 1])
        single = {
            name: a[name][i : i + 1]
            for name in ("swa_block_table", "compressed_block_table", "seq_lens")
        }
        part = problem.but(
            **single,
            q=a["q"][rows],
            topk_indices=a["topk_indices"][rows],
            query_start_loc=int32([0, starts[i + 1] - starts[i]]),
        )
        mine, mine_indices, mine_lengths = flat_v4_call(**part.arguments)
        for k, t in enumerate(range(starts[i], starts[i + 1])):
            keys = mine[mine_indices[k, : mine_lengths[k]].long()]
            assert torch.equal(keys, kv[indices[t, : lengths[t]].long()])
        torch.testing.assert_close(
            v4_prefill(**part.everything).lse, batch.lse[rows], rtol=0, atol=1e-6
        )
