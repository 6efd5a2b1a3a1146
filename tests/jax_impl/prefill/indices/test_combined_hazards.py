"""What would make a token read another request's keys: refused by name, and masked inside jit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl.prefill import indices
from tests.jax_impl.prefill.index_lists import i32

# Two requests of 21 and 9 tokens, of which the last 2 and 3 are queries: windows of 8 from
# position 12 and 0. 5 and 2 compressed entries of 4 positions.
OFFSETS, SEQ_LENS, GATHER_LENS = i32([0, 2, 5]), i32([21, 9]), i32([9, 9])
ENTRIES = i32([[4, 3, 2, 1], [0, 1, 2, 3], [0, -1, -1, -1], [1, 0, -1, -1], [1, 0, -1, -1]])
CHUNK: dict[str, Any] = {
    "workspace_rows": 14,
    "compressed_rows": 5,
    "compress_ratio": 4,
    "window": 8,
}
SWA_TABLE, COMPRESSED_TABLE = i32([[9, 1, 2], [3, 4, 9]]), i32([[0, 1, 2], [3, 9, 9]])
CACHES: dict[str, Any] = {"swa_page_size": 8, "swa_num_slots": 40, "compressed_page_size": 2,
          "compressed_num_slots": 8, "compress_ratio": 4, "window": 8}  # fmt: skip


def rows(entries=ENTRIES, offsets=OFFSETS, seq_lens=SEQ_LENS, gather_lens=GATHER_LENS, **other):
    return indices.combine_topk_swa_indices(
        entries, offsets, seq_lens, gather_lens, **(CHUNK | other)
    )


def slots(entries=ENTRIES, offsets=OFFSETS, seq_lens=SEQ_LENS, swa=SWA_TABLE,
          compressed=COMPRESSED_TABLE, **other):  # fmt: skip
    return indices.combine_topk_swa_slots(
        entries, offsets, seq_lens, swa, compressed, **(CACHES | other)
    )


def changed(array: np.ndarray, at, value: int) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


def test_the_batch_itself_is_accepted():
    np.testing.assert_array_equal(rows().lengths, [12, 12, 8, 10, 10])
    np.testing.assert_array_equal(slots(compressed=i32([[0, 1, 2], [3, 9, 9]])).lengths,
                                  [12, 12, 8, 10, 10])  # fmt: skip


@pytest.mark.parametrize("build", [rows, slots])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"entries": changed(ENTRIES, (3, 1), -1)},
         r"topk_indices.*entries >= 0.*row of the request before.*got -1 in column 1 of token 3"),
        ({"entries": changed(ENTRIES, (2, 0), 1)},
         r"topk_indices.*position 6 sees, under 1; got 1 in column 0 of token 2 \(request 1\)"),
        ({"entries": changed(ENTRIES, (0, 0), 2**31 - 1)}, r"topk_indices.*got 2147483647"),
        ({"seq_lens": i32([21, 2])}, r"seq_lens.*got 2 for request 1.*gives it 3"),
        ({"offsets": i32([0, 5, 2])}, r"query_start_loc must never fall; got 2 after 5"),
        ({"offsets": i32([-1, 1, 4])}, r"query_start_loc must begin at 0 or above; got -1"),
        ({"offsets": i32([0, 2, 6])}, r"query_start_loc.*at most the 5 tokens.*got 6"),
        ({"offsets": i32([0, 5])}, r"seq_lens must be \[n\] = \[1\]; got shape \[2\]"),
        ({"window": 0}, r"window must be an integer from 1.*got 0"),
        ({"compress_ratio": 0}, r"compress_ratio must be an integer from 1.*got 0"),
        ({"topk": 5}, r"topk must be at most the 4 columns of topk_indices; got 5"),
        ({"num_tokens": 6}, r"topk_indices must have a row for each of the 6 tokens.*got 5"),
        ({"max_image_tokens": -1}, r"max_image_tokens.*got -1"),
        ({"entries": ENTRIES.astype(np.int64)}, r"topk_indices must be int32; got int64"),
        ({"seq_lens": SEQ_LENS.astype(np.int64)}, r"seq_lens must be int32; got int64"),
        ({"image_right": i32([0, 1, 0, 0, 0])},
         r"image_right must end at the last position, 20; got 1 for token 1 at position 20"),
        ({"image_left": i32([0, 2, 0, 0, 0])},
         r"image_left must end at this step's first position, 19; got 2 for token 1"),
        ({"image_left": i32([0, -2, 0, 0, 0])}, r"image_left must be 0 or above; got -2"),
        ({"image_left": i32([0, 0])}, r"image_left must have a row for each of the 5 tokens"),
    ],
)  # fmt: skip
def test_what_no_list_can_hold_is_refused_by_name(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compressed_rows": 4},
         r"topk_indices.*under compressed_rows, 4; got 4 in column 0 of token 0"),
        ({"gather_lens": i32([8, 9])},
         r"gather_lens must reach back to position 12.*got 13.*replay_start above 0"),
        ({"gather_lens": i32([22, 9])}, r"gather_lens.*seq_lens, 21.*got 22 for request 0"),
        ({"gather_lens": i32([10, 9])}, r"gather_lens.*compressed_rows, 9; got 10 for request 0"),
        ({"gather_lens": i32([9, -1])}, r"gather_lens.*got -1 for request 1"),
        ({"workspace_rows": 4}, r"compressed_rows must be at most workspace_rows, 4; got 5"),
        ({"workspace_rows": 2**30}, r"workspace_rows times 2 requests.*got 2147483648"),
    ],
)  # fmt: skip
def test_rows_that_the_workspace_does_not_have_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        rows(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa": changed(SWA_TABLE, (0, 1), -1)},
         r"swa_block_table must hold pages from 0 to 4; got -1 in column 1 of request 0"),
        ({"swa": changed(SWA_TABLE, (1, 1), 5)},
         r"swa_block_table.*got 5 in column 1 of request 1"),
        ({"swa": SWA_TABLE[:, :2]}, r"swa_block_table must have a column for page 2 of request 0"),
        ({"swa": SWA_TABLE[:1]}, r"swa_block_table must have a row for each of the 2 requests"),
        ({"compressed": changed(COMPRESSED_TABLE, (0, 2), 4)},
         r"compressed_block_table.*from 0 to 3; got 4 in column 2 of request 0"),
        ({"compressed": None}, r"compressed_block_table must be given for the 4 columns"),
        ({"swa_num_slots": 41}, r"swa_num_slots must be whole pages of 8; got 41"),
        # Without a compressed cache too, whose numbers stand before the window cache's.
        ({"entries": None, "compressed": None, "compressed_page_size": -3},
         r"compressed_page_size must be .*; got -3"),
        ({"entries": None, "compressed": None, "compressed_num_slots": -2},
         r"compressed_num_slots must be .*; got -2"),
        ({"compressed_num_slots": 2**31 - 8}, r"together.*got 2147483680"),
        ({"swa_page_size": 0}, r"swa_page_size.*got 0"),
    ],
)  # fmt: skip
def test_pages_that_a_cache_does_not_have_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        slots(**arguments)


def test_tables_with_more_columns_than_an_int32_numbers_are_refused():
    """Shapes alone: nothing is allocated."""
    table = jax.ShapeDtypeStruct((2, 2**30), np.int32)

    def both(swa, compressed):
        return slots(swa=swa, compressed=compressed)

    with pytest.raises(ValueError, match=r"_block_table together must have at most 2147483645 col"):
        jax.eval_shape(both, table, table)


def test_an_image_too_long_for_the_width_is_refused():
    """Its list would go on where the row ends: window 8, topk 0, images of at most 4."""
    left, right = np.zeros(200, np.int32), np.zeros(200, np.int32)
    right[:150] = np.arange(150)[::-1]
    left[:150] = np.arange(150)
    with pytest.raises(ValueError, match=r"max_image_tokens must leave room .* 128 keys; got 150"):
        indices.combine_topk_swa_indices(
            None, i32([0, 200]), i32([200]), i32([200]), workspace_rows=200, compressed_rows=0,
            compress_ratio=1, window=8, max_image_tokens=4, image_left=left, image_right=right,
        )  # fmt: skip


def test_values_are_not_looked_at_where_that_is_asked_for():
    got = rows(entries=changed(ENTRIES, (3, 1), -1), validate=False)
    np.testing.assert_array_equal(got.indices[3, :3], [15, -1, 19])
    np.testing.assert_array_equal(got.lengths, [12, 12, 8, 10, 10])


def hostile(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """The array with about half of its values replaced by what int32 can hold at worst."""
    worst = i32([-(2**31), -5, -1, 0, 1, 3, 14, 100, 2**30, 2**31 - 1])
    return np.where(rng.random(like.shape) < 0.5, rng.choice(worst, like.shape), like)


@pytest.mark.parametrize("seed", range(60))
def test_inside_jit_no_value_makes_a_token_read_another_requests_rows(seed):
    rng = np.random.default_rng(seed)
    entries, seq_lens, gather_lens = (hostile(rng, x) for x in (ENTRIES, SEQ_LENS, GATHER_LENS))
    images = [hostile(rng, np.zeros(5, np.int32)) for _ in range(2)]
    got = jit_rows(entries, OFFSETS, seq_lens, gather_lens, *images)
    request = np.asarray([0, 0, 1, 1, 1])[:, None]
    listed = np.asarray(got.indices)
    own = (listed >= 14 * request) & (listed < 14 * (request + 1))
    assert (own | (listed == -1)).all()
    assert (np.asarray(got.lengths) >= 0).all() and (np.asarray(got.lengths) <= 128).all()


@pytest.mark.parametrize("seed", range(60))
def test_inside_jit_no_value_makes_a_token_read_another_requests_pages(seed):
    rng = np.random.default_rng(seed)
    entries, seq_lens, swa, compressed = (
        hostile(rng, x) for x in (ENTRIES, SEQ_LENS, SWA_TABLE, COMPRESSED_TABLE)
    )
    images = [hostile(rng, np.zeros(5, np.int32)) for _ in range(2)]
    got = jit_slots(entries, OFFSETS, seq_lens, swa, compressed, *images)
    listed = np.asarray(got.indices)
    for token, request in enumerate([0, 0, 1, 1, 1]):
        pages = {("swa", page) for page in swa[request] if 0 <= page < 5}
        pages |= {("compressed", page) for page in compressed[request] if 0 <= page < 4}
        for slot in listed[token][listed[token] != -1]:
            page = ("compressed", slot // 2) if slot < 8 else ("swa", (slot - 8) // 8)
            assert page in pages, slot


@jax.jit
def jit_rows(entries, offsets, seq_lens, gather_lens, left, right):
    return rows(entries, offsets, seq_lens, gather_lens, image_left=left, image_right=right)


jit_slots = jax.jit(
    lambda entries, offsets, seq_lens, swa, compressed, left, right: functools.partial(
        slots, image_left=left, image_right=right
    )(entries, offsets, seq_lens, swa, compressed)
)
