"""Combined lists, as rows of a workspace and as slots of the paged caches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl.prefill import indices
from tests.jax_impl.prefill.index_lists import (
    Batch,
    filled,
    i32,
    random_batch,
    random_table,
    slot,
    workspace_rows,
)

SEEDS = range(12)


def assert_lists(got: indices.IndexLists, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    for name, right in zip(("indices", "lengths"), wanted, strict=True):
        value = getattr(got, name)
        assert value.dtype == np.int32
        np.testing.assert_array_equal(value, right, err_msg=name)


def settings(batch: Batch) -> dict[str, Any]:
    left, right = batch.images
    images = {"image_left": left, "image_right": right} if batch.max_image else {}
    return {
        "compress_ratio": batch.ratio,
        "window": batch.window,
        "max_image_tokens": batch.max_image,
        **images,
    }


def batch_of(seq_lens, query_lens, *, topk=4, ratio=4, window=8, first=0) -> Batch:
    """Each token chose the first entries that it sees, in order."""
    batch = Batch(
        i32(first + np.cumsum([0, *query_lens])), i32(seq_lens), ratio, window, topk, None,
        ((),) * len(seq_lens), 0,
    )  # fmt: skip
    chosen = [
        [c if c < (position + 1) // ratio else -1 for c in range(topk)]
        for _, position in batch.tokens
    ]
    return dataclasses.replace(batch, topk_indices=i32(chosen).reshape(-1, topk))


def combine(batch: Batch, m: int, n: int, **other) -> indices.IndexLists:
    return indices.combine_topk_swa_indices(
        batch.topk_indices, batch.query_start_loc, batch.seq_lens, batch.gather_lens,
        workspace_rows=m, compressed_rows=n, **(settings(batch) | other),
    )  # fmt: skip


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_the_chosen_entries_then_the_window(seed, images):
    batch = random_batch(seed, images=images)
    n = max((int(seq) // batch.ratio for seq in batch.seq_lens), default=0) if batch.topk else 0
    n += seed % 3  # the planner may only know an upper bound
    m = n + int(batch.gather_lens.max()) + seed % 2
    assert_lists(combine(batch, m, n), workspace_rows(batch, m, n))


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_slots_are_the_same_keys_in_the_same_order(seed, images):
    batch = random_batch(seed, images=images)
    rng = np.random.default_rng(seed)
    requests = len(batch.seq_lens)
    pages = {"swa": int(rng.choice([1, 32, 64])), "compressed": int(rng.choice([2, 64]))}
    columns = {name: -(-int(batch.seq_lens.max()) // size) for name, size in pages.items()}
    tables = {
        name: random_table(rng, requests, columns[name], requests * columns[name] + 3)
        for name in pages
    }
    slots = {name: (tables[name].size + 3) * pages[name] for name in pages}
    base = slots["compressed"] if batch.topk else 0

    def slot_of(request: int, kind: str, number: int) -> int:
        name = "compressed" if kind == "entry" else "swa"
        return slot(tables[name], request, number, pages[name]) + (kind == "position") * base

    lists = [
        [slot_of(request, *key) for key in batch.keys(token)]
        for token, (request, _) in enumerate(batch.tokens)
    ]
    compressed: dict[str, Any] = {
        "compressed_block_table": tables["compressed"],
        "compressed_page_size": pages["compressed"],
        "compressed_num_slots": slots["compressed"],
    }
    got = indices.combine_topk_swa_slots(
        batch.topk_indices, batch.query_start_loc, batch.seq_lens, tables["swa"],
        swa_page_size=pages["swa"], swa_num_slots=slots["swa"],
        **(compressed if batch.topk else {}), **settings(batch),
    )  # fmt: skip
    assert_lists(got, filled(lists, batch.width))


def test_both_requests_of_a_batch_with_global_offsets_use_their_own_rows():
    """vllm-project/vllm#41834: a base that is subtracted twice, or added to one request only."""
    batch = batch_of([6, 21], [3, 2], first=7)
    np.testing.assert_array_equal(batch.gather_lens, [6, 9])
    got = combine(batch, m=14, n=5)
    rows = [
        [0, 5, 6, 7, 8],
        [0, 5, 6, 7, 8, 9],
        [0, 5, 6, 7, 8, 9, 10],
        [14, 15, 16, 17, 19, 20, 21, 22, 23, 24, 25, 26],
        [14, 15, 16, 17, 20, 21, 22, 23, 24, 25, 26, 27],
    ]
    np.testing.assert_array_equal(got.lengths, [5, 6, 7, 12, 12])
    assert_lists(got, filled(rows, 128))


@pytest.mark.parametrize(
    ("position", "first", "count"),
    [(0, 0, 1), (126, 0, 127), (127, 0, 128), (128, 1, 128), (200, 73, 128)],
)
def test_the_window_ends_at_the_token_and_counts_it(position, first, count):
    """vllm-project/vllm#57152."""
    got = indices.combine_topk_swa_indices(
        None, i32([0, 1]), i32([position + 1]), i32([position + 1]),
        workspace_rows=position + 1, compressed_rows=0, compress_ratio=1,
    )  # fmt: skip
    assert_lists(got, filled([list(range(first, position + 1))], 128))
    assert int(got.lengths[0]) == count


def test_a_prompt_in_chunks_lists_what_it_lists_whole():
    """vllm-project/vllm#57152: 300 tokens whole, and as 100 + 100 + 100."""

    def positions(seq_len: int, query_len: int) -> list[list[int]]:
        gathered = query_len + min(seq_len - query_len, 127)
        got = indices.combine_topk_swa_indices(
            None, i32([0, query_len]), i32([seq_len]), i32([gathered]),
            workspace_rows=gathered, compressed_rows=0, compress_ratio=1,
        )  # fmt: skip
        begin = seq_len - gathered
        return [
            [int(x) + begin for x in row[:length]]
            for row, length in zip(np.asarray(got.indices), np.asarray(got.lengths), strict=True)
        ]

    whole = positions(300, 300)
    assert positions(100, 100) + positions(200, 100) + positions(300, 100) == whole
    assert whole[300 - 1] == list(range(172, 300))


def test_a_width_past_an_int32_is_refused_by_its_parts():
    assert indices.combined_width(0, 2**31 - 128, 0) == 2**31 - 128
    with pytest.raises(
        ValueError, match=r"^topk, window and max_image_tokens .*got 1 \+ 2147483520"
    ):
        indices.combined_width(1, 2**31 - 128)


@pytest.mark.parametrize(
    ("topk", "window", "max_image", "width"),
    [(0, 128, 0, 128), (128, 128, 0, 256), (512, 128, 0, 640), (4, 8, 0, 128), (1, 128, 0, 256),
     (0, 128, 1, 256), (2048, 128, 1000, 3200)],
)  # fmt: skip
def test_the_width_is_a_multiple_of_128(topk, window, max_image, width):
    assert indices.combined_width(topk, window, max_image) == width
    got = indices.combine_topk_swa_indices(
        np.full((1, topk), -1, np.int32), i32([0, 1]), i32([1]), i32([1]),
        workspace_rows=1, compressed_rows=0, compress_ratio=4, window=window,
        max_image_tokens=max_image,
    )  # fmt: skip
    assert got.indices.shape == (1, width)
    assert_lists(got, filled([[0]], width))


def test_entries_begin_at_the_first_whole_group_of_positions():
    batch = batch_of([4, 3, 16], [1, 1, 1])
    np.testing.assert_array_equal(combine(batch, m=20, n=4).lengths, [1 + 4, 0 + 3, 4 + 8])


def test_rows_past_the_tokens_are_empty_in_every_form():
    batch = batch_of([6, 21], [3, 2], first=7)
    padded = np.concatenate([batch.topk_indices, np.full((3, 4), 2, np.int32)])
    got = indices.combine_topk_swa_indices(
        padded, batch.query_start_loc, batch.seq_lens, batch.gather_lens,
        workspace_rows=14, compressed_rows=5, **settings(batch),
    )  # fmt: skip
    assert got.indices.shape == (8, 128)
    np.testing.assert_array_equal(got.indices[5:], -1)
    np.testing.assert_array_equal(got.lengths[5:], 0)
    assert_lists(
        jax.tree.map(lambda x: x[:5], got), jax.tree.map(np.asarray, tuple(combine(batch, 14, 5)))
    )


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_batch_without_requests_lists_nothing(tokens):
    empty = i32([])
    for got in (
        indices.combine_topk_swa_indices(
            None, i32([5]), empty, empty, workspace_rows=4, compressed_rows=0, compress_ratio=1,
            num_tokens=tokens,
        ),
        indices.combine_topk_swa_slots(
            None, i32([5]), empty, np.zeros((0, 3), np.int32), swa_page_size=4, swa_num_slots=8,
            compress_ratio=1, num_tokens=tokens,
        ),
    ):  # fmt: skip
        assert got.indices.shape == (tokens, 128)
        np.testing.assert_array_equal(got.indices, -1)
        np.testing.assert_array_equal(got.lengths, 0)


def test_an_image_is_seen_whole_and_extends_the_window():
    """Spec 6 case 24: window 4, an image at positions 10 to 17, at most 8 long."""
    batch = Batch(i32([0, 12]), i32([20]), 1, 4, 0, None, (((10, 17),),), 8)
    got = combine(batch, m=15, n=0)
    begin = 20 - int(batch.gather_lens[0])
    seen = {
        position: [int(x) + begin for x in np.asarray(got.indices)[t] if x >= 0]
        for t, (_, position) in enumerate(batch.tokens)
    }
    assert seen[9] == [6, 7, 8, 9]
    assert seen[10] == [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    assert seen[15] == [10, 11, 12, 13, 14, 15, 16, 17]
    assert seen[17] == [10, 11, 12, 13, 14, 15, 16, 17]
    assert seen[18] == [15, 16, 17, 18]


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_inside_jit_the_lists_are_the_same(seed):
    batch = random_batch(seed, images=True)
    n = max(int(seq) // batch.ratio for seq in batch.seq_lens) if batch.topk else 0
    m = n + int(batch.gather_lens.max())
    build = functools.partial(
        indices.combine_topk_swa_indices,
        workspace_rows=m, compressed_rows=n, compress_ratio=batch.ratio, window=batch.window,
        max_image_tokens=batch.max_image,
    )  # fmt: skip
    left, right = batch.images
    got = jax.jit(build)(
        batch.topk_indices, batch.query_start_loc, batch.seq_lens, batch.gather_lens,
        image_left=left, image_right=right,
    )  # fmt: skip
    assert_lists(got, workspace_rows(batch, m, n))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: indices.c128_topk_indices(
            i32([0, 1]), i32([1]), max_seq_len=2**31 - 1, max_model_len=2**31 - 1,
            compress_ratio=1,
        ), r"^max_seq_len // compress_ratio .*got 2147483647 // 1, which makes 2147483648"),
        (lambda: indices.dspark_indices(
            i32([0, 1]), i32([1]), i32([[0]]), i32([0]), page_size=1,
            num_speculative_tokens=1, window=2**31 - 1,
        ), r"^window and num_speculative_tokens must make .*got 2147483647 \+ 1"),
        (lambda: indices.token_to_request(i32([0, 1]), 1, validate=1),
         r"^validate must be True or False; got 1"),
    ],
)  # fmt: skip
def test_other_lists_past_an_int32_and_flags_that_are_none_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
