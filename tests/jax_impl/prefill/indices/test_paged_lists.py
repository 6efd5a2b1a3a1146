"""Lists of slots in one paged cache: windows, draft blocks, chosen entries and all entries."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl.prefill import indices
from tests.jax_impl.prefill.index_lists import filled, i32, random_batch, random_table, slot
from tests.jax_impl.prefill.indices.test_combined_lists import SEEDS, assert_lists

# One request of 10 tokens, the last 3 of them queries at positions 7, 8 and 9; pages of 4.
ONE: dict[str, Any] = {
    "query_start_loc": i32([2, 5]),
    "seq_lens": i32([10]),
    "block_table": i32([[3, 0, 2]]),
}
REAL: dict[str, Any] = {"slot_mapping": i32([3, 8, 9])}


def positions_of(got: indices.IndexLists, table: list[int], page_size: int) -> list[list[int]]:
    """Slots turned back into positions, for a table whose pages are all different."""
    column = {int(page): c for c, page in enumerate(table)}
    return [
        [column[int(s) // page_size] * page_size + int(s) % page_size for s in row[:length]]
        for row, length in zip(np.asarray(got.indices), np.asarray(got.lengths), strict=True)
    ]


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_windows_are_each_tokens_own(seed, images):
    batch = random_batch(seed, images=images)
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 32, 64]))
    columns = -(-int(batch.seq_lens.max()) // page_size)
    requests = len(batch.seq_lens)
    table = random_table(rng, requests, columns, requests * columns + 2)
    mapping = np.where(rng.random(len(batch.tokens)) < 0.2, -1, 5).astype(np.int32)
    lists = [
        [slot(table, request, p, page_size) for kind, p in batch.keys(t) if kind == "position"]
        if mapping[t] >= 0 else []
        for t, (request, _) in enumerate(batch.tokens)
    ]  # fmt: skip
    left, right = batch.images
    got = indices.paged_swa_indices(
        batch.query_start_loc, batch.seq_lens, table, mapping, page_size=page_size, width=192,
        window=batch.window, num_slots=(requests * columns + 2) * page_size, image_left=left,
        image_right=right,
    )  # fmt: skip
    assert_lists(got, filled(lists, 192))


def test_every_token_of_a_draft_block_has_its_own_window():
    """flashinfer-ai/flashinfer#4137: positions 7, 8, 9 with a window of 4, not all from 6."""
    got = indices.paged_swa_indices(**ONE, **REAL, page_size=4, width=8, window=4)
    assert positions_of(got, [3, 0, 2], 4) == [[4, 5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9]]


def test_the_width_is_not_the_window():
    """local-inference-lab/vllm#623: window 128, width 192, position 300."""
    table = np.arange(10, dtype=np.int32)[None]
    got = indices.paged_swa_indices(
        i32([0, 1]), i32([301]), table, i32([300]), page_size=32, width=192
    )
    assert_lists(got, filled([list(range(173, 301))], 192))
    np.testing.assert_array_equal(got.lengths, [128])


def test_a_window_begins_where_the_replay_does():
    got = indices.paged_swa_indices(
        **ONE, **REAL, page_size=4, width=8, window=4, replay_start=i32([6])
    )
    assert positions_of(got, [3, 0, 2], 4) == [[6, 7], [6, 7, 8], [6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("seq_len", "query_len", "positions"),
    [(10, 3, range(3, 10)), (3, 3, range(3)), (5, 3, range(5)), (10, 1, range(5, 10))],
)
def test_a_draft_block_shares_the_window_before_it(seq_len, query_len, positions):
    """window 4: the block and the 4 positions before it, for every token of it."""
    got = indices.dspark_indices(
        i32([4, 4 + query_len]), i32([seq_len]), ONE["block_table"], i32([7] * query_len),
        page_size=4, num_speculative_tokens=4, window=4,
    )  # fmt: skip
    assert got.indices.shape == (query_len, 64)
    assert positions_of(got, [3, 0, 2], 4) == [list(positions)] * query_len


def test_the_width_of_a_draft_block_is_a_multiple_of_64():
    for drafted, width in ((0, 128), (1, 192), (5, 192), (64, 192), (65, 256)):
        got = indices.dspark_indices(
            **ONE, **REAL, page_size=4, num_speculative_tokens=drafted, window=128
        )
        assert got.indices.shape == (3, width)


def test_chosen_entries_keep_their_columns():
    """Pages of 2 entries; the second token is padding, whose row is made all the same."""
    table, chosen = i32([[2, 0], [1, 3]]), i32([[3, 0, -1], [1, 2, 0], [2, -1, -1], [-1, -1, -1]])
    got = indices.global_topk_slots(
        chosen, i32([0, 0, 1, 1]), table, page_size=2, num_slots=8,
        is_valid_token=np.asarray([True, False, True, True]),
    )  # fmt: skip
    np.testing.assert_array_equal(got.indices, [[1, 4, -1], [5, 0, 4], [6, -1, -1], [-1, -1, -1]])
    np.testing.assert_array_equal(got.lengths, [2, 0, 1, 0])


def test_without_an_indexer_a_token_chooses_all_entries_that_it_sees():
    """Ratio 128: positions 126, 127, 255, 256 see 0, 1, 2, 2 entries."""
    got = indices.c128_topk_indices(
        i32([3, 5, 7]), i32([128, 257]), max_seq_len=257, max_model_len=1000, num_tokens=5
    )
    np.testing.assert_array_equal(got, filled([[], [0], [0, 1], [0, 1], []], 128)[0])


@pytest.mark.parametrize(
    ("max_seq_len", "max_model_len", "width"),
    [(1, 1000, 128), (128 * 128, 10**6, 128), (128 * 129, 10**6, 256), (128 * 500, 10**6, 512),
     (128 * 500, 128 * 300, 384), (128 * 500, 128 * 384 + 1, 512)],
)  # fmt: skip
def test_the_width_of_all_entries_is_a_power_of_two_within_what_the_model_needs(
    max_seq_len, max_model_len, width
):
    assert indices.c128_width(max_seq_len, max_model_len) == width


def test_all_entries_as_slots_of_pages_of_two():
    got = indices.c128_global_slots(
        i32([0, 2, 3]), i32([384, 129]), i32([[5, 1], [0, 7]]), i32([383, -1, 4]),
        page_size=2, width=4, num_slots=16,
    )  # fmt: skip
    # The second token is padding: length 0, its row still made.
    np.testing.assert_array_equal(got.indices[0], [10, 11, -1, -1])
    np.testing.assert_array_equal(got.indices[1], [10, 11, 2, -1])
    np.testing.assert_array_equal(got.indices[2], [0, -1, -1, -1])
    np.testing.assert_array_equal(got.lengths, [2, 0, 1])


BUILDERS = {
    "paged_swa": functools.partial(
        indices.paged_swa_indices, page_size=4, width=8, window=4, num_slots=16
    ),
    "dspark": functools.partial(
        indices.dspark_indices, page_size=4, num_speculative_tokens=4, window=4, num_slots=16
    ),
    "c128": functools.partial(
        indices.c128_global_slots, page_size=4, width=16, compress_ratio=1, num_slots=16
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_padding_token_has_length_0_and_leaves_its_neighbours_alone(name):
    whole = BUILDERS[name](**ONE, **REAL)
    got = BUILDERS[name](**ONE, slot_mapping=i32([3, -1, 9, -1, -1]))
    np.testing.assert_array_equal(got.lengths, [whole.lengths[0], 0, whole.lengths[2], 0, 0])
    for token in (0, 2):
        np.testing.assert_array_equal(got.indices[token], whole.indices[token])
    if name != "c128":
        np.testing.assert_array_equal(got.indices[1], -1)
    np.testing.assert_array_equal(got.indices[3:], -1)


@pytest.mark.parametrize("name", BUILDERS)
def test_inside_jit_the_slots_are_the_same(name):
    whole, got = BUILDERS[name](**ONE, **REAL), jax.jit(BUILDERS[name])(**ONE, **REAL)
    assert_lists(got, (np.asarray(whole.indices), np.asarray(whole.lengths)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", BUILDERS)
def test_inside_jit_no_value_leads_out_of_the_requests_own_pages(name, seed):
    rng = np.random.default_rng(seed)
    worst = i32([-(2**31), -5, -1, 0, 3, 4, 2**30, 2**31 - 1])

    def hostile(like: np.ndarray) -> np.ndarray:
        return np.where(rng.random(like.shape) < 0.5, rng.choice(worst, like.shape), like)

    table = hostile(ONE["block_table"])
    got = jax.jit(BUILDERS[name])(ONE["query_start_loc"], hostile(ONE["seq_lens"]), table,
                                  REAL["slot_mapping"])  # fmt: skip
    listed = np.asarray(got.indices)
    assert np.isin(listed[listed != -1] // 4, table[(table >= 0) & (table < 4)]).all()
    assert (np.asarray(got.lengths) >= 0).all()
    assert (np.asarray(got.lengths) <= listed.shape[1]).all()


def no_requests(build, **other) -> indices.IndexLists:
    return build(i32([4]), i32([]), np.zeros((0, 3), np.int32), i32([-1, -1]), **other)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_batch_without_requests_lists_nothing(name):
    got = no_requests(BUILDERS[name])
    np.testing.assert_array_equal(got.indices, -1)
    np.testing.assert_array_equal(got.lengths, [0, 0])


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slot_mapping": i32([1, 2])}, r"query_start_loc.*at most the 2 tokens.*got 3"),
        ({"seq_lens": i32([2])}, r"seq_lens.*got 2 for request 0"),
        ({"block_table": i32([[3, 0, 4]])}, r"block_table.*0 to 3; got 4 in column 2 of request 0"),
        ({"block_table": i32([[3, -1, 2]])}, r"block_table.*got -1 in column 1 of request 0"),
        ({"block_table": i32([[3]])}, r"block_table must have a column for page . of request 0"),
        ({"block_table": i32([[3], [1]])}, r"block_table must have a row for each of the 1"),
        ({"num_slots": 15}, r"num_slots must be whole pages of 4; got 15"),
        ({"page_size": 0}, r"page_size.*got 0"),
        ({"seq_lens": np.asarray([10])}, r"seq_lens must be int32; got int64"),
    ],
)  # fmt: skip
def test_what_the_cache_cannot_serve_is_refused_by_name(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        BUILDERS[name](**(ONE | REAL | arguments))


def test_lists_that_do_not_fit_their_width_are_refused():
    with pytest.raises(ValueError, match=r"width, window and replay_start.*0 to 3 keys; got 4"):
        indices.paged_swa_indices(**ONE, **REAL, page_size=4, width=3, window=4)
    with pytest.raises(ValueError, match=r"num_speculative_tokens.*0 to 64 keys; got 67"):
        indices.dspark_indices(
            i32([0, 3]), i32([200]), np.arange(50, dtype=np.int32)[None], i32([1, 2, 3]),
            page_size=4, num_speculative_tokens=0, window=64,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"width and compress_ratio.*0 to 2 keys; got 4"):
        indices.c128_global_slots(**ONE, **REAL, page_size=4, width=2, compress_ratio=2)
    with pytest.raises(ValueError, match=r"max_seq_len and max_model_len.*0 to 128.*got 200"):
        indices.c128_topk_indices(
            i32([0, 1]), i32([400]), max_seq_len=2, max_model_len=200, compress_ratio=2
        )


def test_a_replay_begins_at_no_position_before_0():
    with pytest.raises(ValueError, match=r"replay_start must be at least 0; got -3 for request 0"):
        indices.paged_swa_indices(
            **ONE, **REAL, page_size=4, width=8, window=4, replay_start=i32([-3])
        )
    with pytest.raises(ValueError, match=r"replay_start must be at least 0; got -3 for request 1"):
        indices.gather_lens(i32([0, 2, 3]), i32([5, 5]), window=8, replay_start=i32([0, -3]))


def test_a_window_that_ends_before_the_replay_begins_is_refused():
    """Its length would be negative: 8 - 9."""
    with pytest.raises(ValueError, match=r"replay_start.*0 to 8 keys; got -1 for token 0"):
        indices.paged_swa_indices(
            **ONE, **REAL, page_size=4, width=8, window=4, replay_start=i32([9])
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk_indices": i32([[-1, 3], [1, -1]])},
         r"packed to the left.*got -1 in column 0 of token 0 before entry 3"),
        ({"token_to_request": i32([0, 2])}, r"token_to_request.*0 to 1; got 2 for token 1"),
        ({"token_to_request": i32([0])}, r"token_to_request must be \[T\] = \[2\]"),
        ({"topk_indices": i32([[0, 3], [4, -1]])},
         r"block_table must have a column for page 2 of request 1"),
        ({"block_table": i32([[0, 9], [1, 2]])}, r"block_table.*0 to 3; got 9 in column 1"),
        ({"is_valid_token": np.asarray([1, 0])}, r"is_valid_token must be bool; got int64"),
    ],
)  # fmt: skip
def test_chosen_entries_that_cannot_be_served_are_refused_by_name(arguments, message):
    right: dict[str, Any] = {
        "topk_indices": i32([[0, 3], [1, -1]]),
        "token_to_request": i32([0, 1]),
        "block_table": i32([[0, 3], [1, 2]]),
    }
    indices.global_topk_slots(**right, page_size=2, num_slots=8)
    with pytest.raises(ValueError, match=message):
        indices.global_topk_slots(**(right | arguments), page_size=2, num_slots=8)
