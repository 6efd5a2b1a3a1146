"""Which request a token belongs to, what its request gathers, and what image it is in."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_impl.prefill import indices
from tests.jax_impl.prefill.index_lists import i32, random_batch
from tests.jax_impl.prefill.indices.test_combined_lists import SEEDS

OFFSETS, SEQ_LENS = i32([5, 5, 9, 9, 12]), i32([3, 9, 4, 30])


def spans(*each):
    return indices.image_spans_csr(each)


def test_requests_without_tokens_own_none():
    got = indices.token_to_request(i32([0, 0, 6, 8, 8, 9]), 9)
    np.testing.assert_array_equal(got, [1, 1, 1, 1, 1, 1, 2, 2, 4])


def test_rows_count_from_the_first_offset():
    np.testing.assert_array_equal(indices.token_to_request(OFFSETS, 7), [1, 1, 1, 1, 3, 3, 3])


def test_padding_is_the_last_requests_or_where_it_is_told_request_0():
    """vLLM's builder: clamped at the last request, 0 from num_mapped on."""
    offsets = i32([0, 2, 3])
    np.testing.assert_array_equal(indices.token_to_request(offsets, 5), [0, 0, 1, 1, 1])
    got = indices.token_to_request(offsets, 5, num_mapped=3)
    np.testing.assert_array_equal(got, [0, 0, 1, 0, 0])


def test_a_ragged_batch_is_not_cut_evenly():
    """vllm-project/vllm#52500: 6 + 2 + 1 tokens, a number that 3 divides."""
    got = indices.token_to_request(i32([0, 6, 8, 9]), 9)
    np.testing.assert_array_equal(got, [0, 0, 0, 0, 0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((i32([0, 3, 2]), 3), "query_start_loc must never fall; got 2 after 3"),
     ((i32([0]), 0), "query_start_loc must have an entry more"),
     ((i32([]), 0), r"query_start_loc must be \[n \+ 1\]"),
     ((i32([0, 2]), -1), "num_tokens.*got -1"),
     ((np.asarray([0, 2]), 2), "query_start_loc must be int32; got int64"),
     (([0, 2], 2), "query_start_loc must be an int32 array")],
)  # fmt: skip
def test_offsets_that_are_none_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        indices.token_to_request(*arguments)


def test_a_request_gathers_its_tokens_and_the_window_before_them():
    """window 4; nothing before, 5, 4 (without tokens) and 27 tokens before."""
    got = indices.gather_lens(OFFSETS, SEQ_LENS, window=4)
    np.testing.assert_array_equal(got, [3, 4 + 3, 3, 3 + 3])
    replayed = indices.gather_lens(OFFSETS, SEQ_LENS, window=4, replay_start=i32([0, 4, 9, 25]))
    np.testing.assert_array_equal(replayed, [3, 4 + 1, 0, 3 + 2])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_token_sees_its_image_to_both_sides(seed):
    batch = random_batch(seed, images=True)
    got = indices.image_visibility(
        batch.query_start_loc, batch.seq_lens, *spans(*batch.spans),
        max_image_tokens=batch.max_image,
    )  # fmt: skip
    np.testing.assert_array_equal(got.left, batch.images[0])
    np.testing.assert_array_equal(got.right, batch.images[1])


def test_of_images_that_overlap_the_last_one_counts():
    got = indices.image_visibility(
        i32([0, 8]), i32([8]), *spans([(0, 5), (4, 7), (2, 3)]), max_image_tokens=8
    )
    np.testing.assert_array_equal(got.left, [0, 1, 0, 1, 0, 1, 2, 3])
    np.testing.assert_array_equal(got.right, [5, 4, 1, 0, 3, 2, 1, 0])


def test_padding_is_in_no_image():
    got = indices.image_visibility(
        i32([3, 5]), i32([9]), *spans([(7, 8)]), max_image_tokens=2, num_tokens=4
    )
    np.testing.assert_array_equal(got.left, [0, 1, 0, 0])
    np.testing.assert_array_equal(got.right, [1, 0, 0, 0])


def test_a_batch_without_images_sees_none():
    got = indices.image_visibility(OFFSETS, SEQ_LENS, *spans((), (), (), ()), max_image_tokens=0)
    np.testing.assert_array_equal(got.left, np.zeros(7))
    np.testing.assert_array_equal(got.right, np.zeros(7))


def test_inside_jit_images_are_the_same():
    arrays = (OFFSETS, SEQ_LENS, *spans((), [(5, 6), (7, 8)], (), [(28, 29)]))
    outside = indices.image_visibility(*arrays, max_image_tokens=2)
    inside = jax.jit(lambda *a: indices.image_visibility(*a, max_image_tokens=2, num_tokens=7))(
        *arrays
    )
    jax.tree.map(np.testing.assert_array_equal, outside, inside)


def test_inside_jit_the_number_of_tokens_has_to_be_told():
    with pytest.raises(ValueError, match="num_tokens must be given inside jit"):
        jax.jit(lambda *a: indices.image_visibility(*a, max_image_tokens=2))(
            OFFSETS, SEQ_LENS, *spans((), (), (), ())
        )


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ((4, 6), r"positions 4 to 6 of request 1 is not wholly.*positions 5 to 8"),
        ((7, 9), r"positions 7 to 9 of request 1 is not wholly"),
        ((5, 8), r"positions 5 to 8 of request 1 is longer than max_image_tokens, 3"),
        ((7, 6), r"positions 7 to 6 of request 1 is empty"),
    ],
)
def test_images_whose_rows_would_not_all_be_there_are_refused(span, message):
    with pytest.raises(ValueError, match=message):
        indices.image_visibility(OFFSETS, SEQ_LENS, *spans((), [span], (), ()), max_image_tokens=3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((i32([[5, 6]]), i32([0, 0, 2, 2, 2])), "span_offsets must run from 0 to the 1 spans"),
        ((i32([[5, 6]]), i32([0, 1])), r"span_offsets must be \[n \+ 1\] = \[5\]"),
        ((i32([[5, 6, 7]]), i32([0, 0, 1, 1, 1])), r"spans must be \[S, 2\]"),
        ((np.asarray([[5, 6]]), i32([0, 0, 1, 1, 1])), "spans must be int32; got int64"),
    ],
)
def test_lists_of_images_that_do_not_fit_the_batch_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        indices.image_visibility(OFFSETS, SEQ_LENS, *arrays, max_image_tokens=3)


@pytest.mark.parametrize(
    ("image_spans", "message"),
    [([[(1, 2, 3)]], r"\(first, last\) positions .*got \[\(1, 2, 3\)\] for request 0"),
     ([(1, 2)], r"got \(1, 2\) for request 0"),
     ([[], [], 7], "got 7 for request 2"),
     ([[5]], r"got \[5\] for request 0"),
     ([[(-1, 2)]], "span 0, must be an integer from 0.*got -1"),
     ([[(0, 2.0)]], "span 0, must be an integer.*got 2.0")],
)  # fmt: skip
def test_spans_that_are_no_pair_of_positions_are_refused(image_spans, message):
    with pytest.raises(ValueError, match=message):
        indices.image_spans_csr(image_spans)
