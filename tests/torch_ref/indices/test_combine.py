"""The lists of prefill, against the definition column by column; hazards refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_ref.v4.problems import int32
from torch_ref.indices import combine_topk_swa_indices, image_visibility


def lists(seq, q, ratio, topk, seed=0):
    """Visible entries of each token in random order, garbage behind them."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.full((sum(q), topk), 1 << 29, dtype=torch.int32)
    t = 0
    for s, count in zip(seq, q, strict=True):
        for position in range(s - count, s):
            chosen = torch.randperm((position + 1) // ratio, generator=g)[:topk]
            rows[t, : len(chosen)] = chosen.int()
            t += 1
    return rows


def gathers(seq, q, window):
    return [n + min(s - n, window - 1) for s, n in zip(seq, q, strict=True)]


def by_columns(topk_indices, seq, q, gather, window, ratio, topk, M, N, C, images=None):
    """indices and lengths, written as the definition reads."""
    rows, lengths, t = [], [], 0
    for b, (s, count) in enumerate(zip(seq, q, strict=True)):
        for position in range(s - count, s):
            row = [-1] * C
            entries = min((position + 1) // ratio, topk)
            for c in range(entries):
                row[c] = int(topk_indices[t, c]) + M * b
            left = right = 0
            for first, last in images[b] if images else []:
                if first <= position <= last:
                    left, right = position - first, last - position
            more = max(left - (window - 1), 0)
            start = max(position - (window - 1) - more, 0)
            count_swa = position + right - start + 1
            for k in range(count_swa):
                row[entries + k] = M * b + N + (start + k) - (s - gather[b])
            rows.append(row)
            lengths.append(entries + count_swa)
            t += 1
    return rows, lengths


BATCHES = [
    ([6, 21], [3, 2]),
    ([40, 33, 9, 300, 17], [5, 0, 9, 20, 1]),
    ([3, 4, 5, 127, 128, 129], [3, 4, 5, 1, 2, 3]),
    ([7], [7]),
    ([50, 8, 8], [0, 1, 0]),
]


@pytest.mark.parametrize(("seq", "q"), BATCHES)
@pytest.mark.parametrize(
    ("ratio", "topk", "window"),
    [(1, 0, 8), (4, 4, 8), (4, 120, 8), (2, 16, 128), (128, 2, 8), (4, 128, 128), (4, 64, 128)],
)
@pytest.mark.parametrize("offset", [0, 9])
def test_each_column_is_what_the_definition_gives_it(seq, q, ratio, topk, window, offset):
    chosen = lists(seq, q, ratio, topk)
    gather = gathers(seq, q, window)
    N = max(s // ratio for s in seq) + 3 if topk else 0  # the host's bound may be above
    M = N + max(gather) + 2
    starts = [offset + sum(q[:i]) for i in range(len(q) + 1)]
    indices, lengths = combine_topk_swa_indices(
        chosen if topk else None,
        int32(starts),
        int32(seq),
        int32(gather),
        window=window,
        compress_ratio=ratio,
        topk=topk,
        workspace_rows=M,
        compressed_rows=N,
    )
    C = -(-(topk + window) // 128) * 128
    want = by_columns(chosen, seq, q, gather, window, ratio, topk, M, N, C)
    assert indices.dtype == lengths.dtype == torch.int32 and indices.shape == (sum(q), C)
    assert (indices.tolist(), lengths.tolist()) == want


@pytest.mark.parametrize(
    "images",
    [
        [[(10, 15), (17, 19)], [(0, 8)], []],
        [[(10, 15), (13, 17)], [(4, 4), (4, 5)], [(100, 116)]],
    ],
)
@pytest.mark.parametrize("window", [4, 8])
def test_images_widen_the_window_both_ways(images, window):
    seq, q, ratio, topk, N = [20, 9, 130], [10, 9, 30], 4, 4, 40
    chosen = lists(seq, q, ratio, topk)
    gather = gathers(seq, q, window)
    starts = int32([0, 10, 19, 49])
    left, right = image_visibility(starts, int32(seq), images, max_image_tokens=17)
    indices, lengths = combine_topk_swa_indices(
        chosen,
        starts,
        int32(seq),
        int32(gather),
        window=window,
        compress_ratio=ratio,
        topk=topk,
        workspace_rows=90,
        compressed_rows=N,
        image_left=left,
        image_right=right,
        max_image_tokens=17,
    )
    want = by_columns(chosen, seq, q, gather, window, ratio, topk, 90, N, 128, images)
    assert (indices.tolist(), lengths.tolist()) == want


def call(**changes: Any) -> tuple[list[list[int]], list[int]]:
    """Two requests (T, q) = (6, 3), (21, 2), global offsets 7, 10, 12 of vllm#41834."""
    arguments: dict[str, Any] = {
        "topk_indices": int32([[0, -1, -1, -1]] * 3 + [[0, 1, 2, 3]] * 2),
        "query_start_loc": int32([7, 10, 12]),
        "seq_lens": int32([6, 21]),
        "gather_lens": int32([6, 9]),
        "window": 8,
        "compress_ratio": 4,
        "topk": 4,
        "workspace_rows": 14,
        "compressed_rows": 5,
        **changes,
    }
    indices, lengths = combine_topk_swa_indices(**arguments)
    return indices.tolist(), lengths.tolist()


def test_known_rows_of_two_requests():
    indices, lengths = call()
    assert lengths == [5, 6, 7, 12, 12] and {len(row) for row in indices} == {128}
    assert [row[:n] for row, n in zip(indices, lengths, strict=True)] == [
        [0, *range(5, 9)],
        [0, *range(5, 10)],
        [0, *range(5, 11)],
        [14, 15, 16, 17, *range(19, 27)],
        [14, 15, 16, 17, *range(20, 28)],
    ]  # wrong: second request's rows below 14, or everything shifted by 7
    assert all(set(row[n:]) == {-1} for row, n in zip(indices, lengths, strict=True))


def test_what_stands_behind_a_list_is_not_copied():
    garbage = int32([[0, 99, -5, 1]] * 3 + [[0, 1, 2, 3]] * 2)
    assert call(topk_indices=garbage) == call()


@pytest.mark.parametrize(
    ("position", "first", "count"),
    [(0, 0, 1), (126, 0, 127), (127, 0, 128), (128, 1, 128), (200, 73, 128)],
)
def test_the_window_is_128_with_the_token_itself(position, first, count):
    indices, lengths = combine_topk_swa_indices(
        None,
        int32([0, 300]),
        int32([300]),
        int32([300]),
        window=128,
        compress_ratio=1,
        topk=0,
        workspace_rows=300,
        compressed_rows=0,
    )
    assert indices.shape == (300, 128)
    want = list(range(first, position + 1)) + [-1] * (128 - count)
    assert int(lengths[position]) == count and indices[position].tolist() == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"topk_indices": int32([[0] * 4] * 3 + [[0, 1, -1, 3], [0, 1, 2, 3]])},
            "topk_indices: -1 in column 2 of token 3, whose list is its first 4 columns; accepted "
            "are entries 0 to 4",
        ),
        (
            {"topk_indices": int32([[1, -1, -1, -1]] * 3 + [[0, 1, 2, 3]] * 2)},
            "topk_indices: 1 in column 0 of token 0, whose list is its first 1 columns; accepted "
            "are entries 0 to 0",
        ),
        (
            {"compressed_rows": 3, "workspace_rows": 12},
            "topk_indices: 3 in column 3 of token 3",
        ),
        ({"topk_indices": int32([[0]] * 5)}, "topk_indices: 1 columns; a token's list holds 4"),
        ({"topk_indices": None}, "topk_indices: None; accepted is [T, topk]"),
        ({"topk_indices": int32([[0] * 4] * 4)}, "topk_indices: shape [4, 4]; accepted is [5, col"),
        (
            {"gather_lens": int32([6, 8])},
            "gather_lens: 8 for request 1, whose token 3 sees position 12; the first gathered one "
            "is 13",
        ),
        ({"gather_lens": int32([7, 9])}, "gather_lens: 7 for request 0 of 6 tokens"),
        ({"workspace_rows": 13}, "gather_lens: 9 for request 1 of 21 tokens; accepted are at most"),
        ({"window": 2**31 - 1}, "window: lists would be 2147483776 columns wide, of topk = 4, wi"),
        ({"workspace_rows": 4}, "workspace_rows: 4; accepted are 5 and more"),
        ({"workspace_rows": 1 << 30}, "workspace_rows: 1073741824 for each of 2 requests"),
        ({"gather_lens": int32([6])}, "gather_lens: shape [1]; accepted is [2]"),
        ({"image_left": int32([0] * 4)}, "image_left: shape [4]; accepted is [5]"),
        ({"image_left": int32([0, 0, -1, 0, 0])}, "image_left: -1 for token 2; accepted are 0"),
        (
            {"image_right": int32([0, 0, 1, 0, 0])},
            "image_right: 1 for token 2 at position 5; request 0 ends with position 5",
        ),
        (
            {"image_left": int32([0, 0, 0, 0, 9])},
            "gather_lens: 9 for request 1, whose token 4 sees position 11; the first gathered",
        ),
    ],
)
def test_hazards_are_refused_by_name(changes, message):
    with pytest.raises(ValueError) as error:
        call(**changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("topk", "max_image", "width"), [(0, 0, 128), (120, 0, 128), (121, 0, 256), (120, 1, 256)]
)
def test_the_width_has_room_for_entries_window_and_image(topk, max_image, width):
    lists = int32([[*range(5), *[-1] * 120]] * 5)
    lists[:3, 1:] = -1
    indices, _ = call(topk_indices=lists, topk=topk, max_image_tokens=max_image)
    assert {len(row) for row in indices} == {width}


def test_an_image_wider_than_its_columns_is_refused():
    n = 200
    right = torch.arange(n - 1, -1, -1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"^max_image_tokens: 3, so that lists are 128 wide; token"
    ):
        combine_topk_swa_indices(
            None,
            int32([0, n]),
            int32([n]),
            int32([n]),
            window=8,
            compress_ratio=1,
            topk=0,
            workspace_rows=n,
            compressed_rows=0,
            image_right=right,
            max_image_tokens=3,
        )


def test_a_request_without_tokens_has_no_rows_and_is_not_judged():
    indices, _ = call(
        topk_indices=int32([[0, 1, 2, 3]] * 2),
        query_start_loc=int32([3, 3, 5]),
        gather_lens=int32([0, 9]),
    )
    assert len(indices) == 2 and indices[0][:2] == [14, 15]
