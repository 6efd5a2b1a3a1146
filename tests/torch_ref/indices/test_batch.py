"""Tokens, requests and positions; images and what their tokens see."""

from __future__ import annotations

import pytest
import torch

from tests.torch_ref.v4.problems import int32
from torch_ref.indices import image_visibility, token_batch, token_to_request


@pytest.mark.parametrize("offset", [0, 7])
def test_tokens_have_the_positions_that_end_their_context(offset):
    batch = token_batch(int32([offset + x for x in (0, 3, 3, 5)]), int32([6, 40, 21]))
    assert batch.request.tolist() == [0, 0, 0, 2, 2]
    assert batch.position.tolist() == [3, 4, 5, 19, 20]
    assert batch.query_lens == (3, 0, 2) and batch.prefixes == (3, 40, 19)
    assert batch.first_rows == (0, 3, 3)


@pytest.mark.parametrize("starts", [[5], [5, 5], [0, 0, 0]])
def test_a_batch_may_have_no_tokens(starts):
    batch = token_batch(int32(starts), int32([4] * (len(starts) - 1)))
    assert batch.tokens == 0 and batch.position.shape == (0,)


@pytest.mark.parametrize("starts", [[0, 6, 8, 9], [0, 0, 2, 2, 5, 5], [4, 4, 6], [0, 1]])
@pytest.mark.parametrize("extra", [0, 3])
def test_a_token_belongs_to_the_first_request_that_ends_behind_it(starts, extra):
    tokens, n = starts[-1] - starts[0] + extra, len(starts) - 1
    want = []
    for t in range(tokens):
        behind = [i for i in range(n) if starts[i + 1] - starts[0] > t]
        want.append(min([*behind, n - 1]))
    got = token_to_request(int32(starts), tokens)
    assert got.dtype == torch.int32 and got.tolist() == want
    for mapped in (0, max(tokens - 2, 0), tokens):
        got = token_to_request(int32(starts), tokens, num_mapped=mapped)
        assert got.tolist() == want[:mapped] + [0] * (tokens - mapped)


def test_ragged_requests_are_not_viewed_as_uniform():
    # vllm#52500; wrong: 3 + 3 + 3.
    assert token_to_request(int32([0, 6, 8, 9]), 9).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("starts", "seq", "message"),
    [
        ([0, 3, 2], [5, 5], "query_start_loc: 2 after 3 at request 1"),
        ([0, 3], [2], "seq_lens: 2 for request 0 of 3 query tokens; accepted are 3 and more"),
        ([0, 3], [2, 5], "seq_lens: shape [2]; accepted is [1]"),
        ([], [], "query_start_loc: shape [0]; accepted is [n + 1]"),
    ],
)
def test_lengths_that_contradict_one_another_are_refused(starts, seq, message):
    with pytest.raises(ValueError) as error:
        token_batch(int32(starts), int32(seq))
    assert str(error.value).startswith(message)


def test_a_token_needs_a_request():
    with pytest.raises(ValueError, match=r"^query_start_loc: no request"):
        token_to_request(int32([0]), 1)
    with pytest.raises(ValueError, match=r"^num_tokens: -1; accepted are 0 and more"):
        token_to_request(int32([0, 1]), -1)


@pytest.mark.parametrize(
    "spans",
    [
        [[(12, 15)], [], [(40, 40)]],
        [[(10, 13), (15, 19)], [], []],
        [[(10, 15), (13, 17)], [], [(30, 40), (32, 34)]],
        [[(10, 19)], [], [(30, 40)]],
    ],
)
def test_tokens_of_an_image_see_all_of_it(spans):
    starts, seq = [3, 13, 13, 24], [20, 9, 41]
    left, right = image_visibility(int32(starts), int32(seq), spans, max_image_tokens=11)
    t = 0
    for i in range(3):
        for position in range(seq[i] - (starts[i + 1] - starts[i]), seq[i]):
            holding = [(a, b) for a, b in spans[i] if a <= position <= b]
            a, b = holding[-1] if holding else (position, position)
            assert (int(left[t]), int(right[t])) == (position - a, b - position)
            t += 1
    assert t == len(left) == len(right) and left.dtype == right.dtype == torch.int32


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[(9, 12)], []], "image_spans: [9, 12] of request 0; accepted are spans within its query"),
        ([[(18, 20)], []], "image_spans: [18, 20] of request 0; accepted are spans within"),
        ([[(13, 12)], []], "image_spans: [13, 12] of request 0"),
        ([[], [(4, 4)]], "image_spans: [4, 4] of request 1"),
        ([[(10, 14)], []], "image_spans: [10, 14] of request 0 holds 5 tokens; accepted are max"),
        (
            [(10, 11), []],
            "image_spans: (10, 11) for request 0; accepted is a tuple of (first, last)",
        ),
        ([[], 7], "image_spans: 7 for request 1; accepted is a tuple of (first, last) pairs"),
        ([[(10, 11, 12)], []], "image_spans: [(10, 11, 12)] for request 0; accepted is a tuple"),
        ([[(10, 11.5)], []], "image_spans, request 0: 11.5; accepted are whole numbers"),
        ([[], [(8, 8)]], "image_spans: [8, 8] of request 1, which has no query tokens"),
        (7, "image_spans: 7; accepted is a list of the images of each request"),
        ([[(10, 11)]], "image_spans: 1 requests; query_start_loc has 2"),
    ],
)
def test_images_that_an_engine_would_misread_are_refused(spans, message):
    with pytest.raises(ValueError) as error:
        image_visibility(int32([0, 10, 10]), int32([20, 9]), spans, max_image_tokens=4)
    assert str(error.value).startswith(message)
