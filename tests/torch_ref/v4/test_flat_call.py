"""The batch as one sparse prefill: every token's keys, in order, from the unpaged rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.torch_ref.v4.problems import V4Problem, answer, int32, v4_problem
from torch_ref import flat_v4_call, sparse_prefill_oracle


def problems() -> Iterator[tuple[str, V4Problem]]:
    batch = [40, 33, 9, 300, 17], [5, 0, 9, 20, 1]
    for ratio, topk in ((1, 0), (2, 40), (4, 4), (128, 3)):
        for kv_format in ("v4-fp8", "bf16"):
            yield (
                f"{ratio}-{kv_format}",
                v4_problem(*batch, ratio=ratio, topk=topk, kv_format=kv_format, seed=ratio),
            )
    images = [[(36, 39)], [], [(2, 6), (5, 7)], [(281, 299)], []]
    yield "images", v4_problem(*batch, images=images, max_image=19)
    yield "offset", v4_problem(*batch, offset=7)
    yield "window of 128", v4_problem(*batch, window=128, page=64)
    yield "no sink", v4_problem([9], [9], sink=False)


@pytest.mark.parametrize("problem", [pytest.param(p, id=name) for name, p in problems()])
def test_each_row_lists_its_tokens_keys_in_order(problem):
    kv, indices, lengths = flat_v4_call(**problem.arguments)
    assert indices.dtype == lengths.dtype == torch.int32 and kv.dtype == torch.bfloat16
    for t in range(len(lengths)):
        row = indices[t].tolist()
        keys = problem.keys(t)
        assert int(lengths[t]) == len(keys) and set(row[len(keys) :]) <= {-1}
        assert torch.equal(kv[row[: len(keys)]], keys)
    assert indices.shape[1] == int(lengths.max()) and not kv.isnan().any()


@pytest.mark.parametrize("problem", [pytest.param(p, id=name) for name, p in problems()])
def test_its_sparse_prefill_is_the_answer(problem):
    kv, indices, lengths = flat_v4_call(**problem.arguments)
    a = problem.arguments
    got = sparse_prefill_oracle(
        a["q"], kv, indices, a["sm_scale"], attn_sink=a["attn_sink"], topk_length=lengths
    )
    for mine, right in zip((got.out, got.max_logits, got.lse), answer(problem), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("position", "first", "count"),
    [(0, 0, 1), (126, 0, 127), (127, 0, 128), (128, 1, 128), (200, 73, 128)],
)
def test_the_window_ends_with_the_token_itself(position, first, count):
    # vllm#57152; wrong: 129 keys, or a start of 0 at position 128.
    whole = v4_problem([300], [300], ratio=1, window=128, page=64, heads=1)
    _, indices, lengths = flat_v4_call(**whole.arguments)
    assert int(lengths[position]) == count and int(indices[position, 0]) == first


def test_a_prompt_in_three_steps_sees_what_it_sees_in_one():
    whole = v4_problem([300], [300], ratio=1, window=128, page=64, heads=1)
    a = whole.arguments
    kv, indices, lengths = flat_v4_call(**a)
    for step in (100, 200, 300):
        part = whole.but(
            q=a["q"][step - 100 : step], query_start_loc=int32([0, 100]), seq_lens=int32([step])
        )
        part_kv, part_indices, part_lengths = flat_v4_call(**part.arguments)
        assert len(part_kv) == 100 + min(step - 100, 127)
        for t in range(100):
            mine = part_kv[part_indices[t, : part_lengths[t]].long()]
            assert torch.equal(mine, kv[indices[step - 100 + t, : lengths[step - 100 + t]].long()])


def test_known_rows_of_two_requests():
    # vllm#41834, numbered request by request: 1 entry and 6 positions, then 5 and 9 (from 12 on).
    problem = v4_problem([6, 21], [3, 2], offset=7)
    lists = int32([[0, -1, -1, -1]] * 3 + [[0, 1, 2, 3]] * 2)
    kv, indices, lengths = flat_v4_call(**problem.but(topk_indices=lists).arguments)
    assert len(kv) == 1 + 6 + 5 + 9 and lengths.tolist() == [5, 6, 7, 12, 12]
    rows = [row[:n] for row, n in zip(indices.tolist(), lengths.tolist(), strict=True)]
    assert rows[:3] == [[0, *range(1, 5)], [0, *range(1, 6)], [0, *range(1, 7)]]
    assert rows[3:] == [[7, 8, 9, 10, *range(12, 20)], [7, 8, 9, 10, *range(13, 21)]]


def test_nothing_to_do_is_an_empty_call():
    for q in ([], [0, 0]):
        kv, indices, lengths = flat_v4_call(**v4_problem([30] * len(q), q).arguments)
        assert kv.shape == (0, 512) and indices.shape == (0, 0) and lengths.shape == (0,)


def test_a_request_without_query_tokens_is_not_read():
    problem = v4_problem([40, 33], [5, 0])
    tables = {
        name: problem.arguments[name].clone()
        for name in ("swa_block_table", "compressed_block_table")
    }
    for table in tables.values():
        table[1] = -5
    kv, *_ = flat_v4_call(**problem.but(**tables).arguments)
    assert len(kv) == 10 + 12


MISFITS = [
    ({"q": torch.zeros(9, 2, 512)}, "q: dtype torch.float32; accepted is torch.bfloat16"),
    ({"q": torch.zeros(9, 2, 576).bfloat16()}, "q: shape [9, 2, 576]; accepted is [T, H, 512]"),
    ({"q": torch.zeros(9, 129, 512).bfloat16()}, "q: 129 heads; accepted are 1 to 128"),
    ({"q": torch.zeros(8, 2, 512).bfloat16()}, "q: 8 rows; query_start_loc counts 9 tokens"),
    ({"q": torch.zeros(10, 2, 512).bfloat16()}, "q: 10 rows; query_start_loc counts 9 tokens"),
    ({"kv_format": "v3.2-fp8"}, "kv_format: 'v3.2-fp8'; accepted are v4-fp8 and bf16"),
    ({"swa_page": 8}, "swa_cache: cache: shape ["),
    ({"compressed_page": 2}, "compressed_cache: cache: shape ["),
    ({"seq_lens": int32([3, 9])}, "seq_lens: 3 for request 0 of 4 query tokens"),
    ({"query_start_loc": int32([0, 9, 4])}, "query_start_loc: 4 after 9 at request 1"),
    ({"query_start_loc": torch.tensor([0, 4, 9])}, "query_start_loc: dtype torch.int64"),
    ({"compress_ratio": 0}, "compress_ratio: 0; accepted are 1 and more"),
    ({"window": 0}, "window: 0; accepted are 1 and more"),
    ({"window": 2**31 - 1}, "window: lists would be 2147483776 columns wide, of topk = "),
    ({"max_image_tokens": 2**31 - 1}, "max_image_tokens: lists would be 2147483776 columns wide"),
    ({"image_spans": [[], (6, 7)], "max_image_tokens": 4}, "image_spans: (6, 7) for request 1;"),
    ({"sm_scale": math.nan}, "sm_scale: nan; accepted is"),
    ({"attn_sink": torch.zeros(3)}, "attn_sink: shape [3]; accepted is [H] = [2]"),
    ({"topk_indices": None}, "topk_indices: None; compressed_cache and compressed_page and"),
    ({"topk_indices": int32([[0]] * 8)}, "topk_indices: shape [8, 1]; accepted is [9, columns]"),
    ({"swa_block_table": int32([[0]])}, "swa_block_table: shape [1, 1]; accepted is [2, columns]"),
    ({"swa_block_table": int32([[0], [0]])}, "swa_block_table: 1 columns; position 9 of request 0"),
    ({"compressed_block_table": int32([[99], [0]])}, "compressed_block_table: page 99 at column 0"),
    ({"image_spans": [[(15, 16)], []], "max_image_tokens": 4}, "image_spans: [15, 16] of request"),
]


@pytest.mark.parametrize(("changes", "message"), MISFITS, ids=[m[:40] for _, m in MISFITS])
def test_what_does_not_fit_is_named(changes, message):
    problem = v4_problem([20, 9], [4, 5])
    with pytest.raises(ValueError) as error:
        flat_v4_call(**problem.but(**changes).arguments)
    assert str(error.value).startswith(message)


def test_a_ratio_above_one_needs_its_cache_and_ratio_one_may_have_one():
    plain = v4_problem([20], [4], ratio=1)
    with pytest.raises(ValueError, match=r"^compressed_cache: None with compress_ratio = 4"):
        flat_v4_call(**plain.but(compress_ratio=4).arguments)
    # V4.1 has layers that keep every token in a compressed cache of ratio 1 as well.
    both = v4_problem([20], [4], ratio=1)
    a = both.arguments
    extra = {
        "compressed_cache": a["swa_cache"],
        "compressed_page": a["swa_page"],
        "compressed_block_table": a["swa_block_table"],
        "topk_indices": int32([[3, 16 + t] for t in range(4)]),
    }
    kv, indices, lengths = flat_v4_call(**both.but(**extra).arguments)
    assert (
        lengths.tolist() == [10] * 4 and indices[:, :2].tolist() == extra["topk_indices"].tolist()
    )
    assert torch.equal(kv[:20], both.positions[0])


@pytest.mark.parametrize(
    ("place", "bad"), [((0, 0), -1), ((3, 2), -1), ((3, 3), 5), ((0, 1), 4), ((8, 1), 2)]
)
def test_an_entry_that_its_token_cannot_see_is_refused(place, bad):
    # Positions 16 to 19 see 4 or 5 entries, 4 to 8 see 1 or 2; a -1 there would be another's row.
    problem = v4_problem([20, 9], [4, 5])
    lists = problem.arguments["topk_indices"].clone()
    assert lists.tolist()[8][2:] == [-1, -1]
    lists[place] = bad
    with pytest.raises(ValueError, match=rf"^topk_indices: {bad} in column {place[1]} of token "):
        flat_v4_call(**problem.but(topk_indices=lists).arguments)


@pytest.mark.parametrize("bad", [-1, -9, 3, 99])
def test_what_stands_behind_the_list_is_not_looked_at(bad):
    problem = v4_problem([20, 9], [4, 5])
    want = flat_v4_call(**problem.arguments)
    lists = problem.arguments["topk_indices"].clone()
    lists[8, 2:] = bad
    got = flat_v4_call(**problem.but(topk_indices=lists).arguments)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
