"""Slots of the window and of compressed entries, against loops; pad tokens in every builder."""

from __future__ import annotations

import pytest
import torch

from tests.torch_ref.v4.problems import int32
from torch_ref.indices import (
    c128_global_slots,
    c128_topk_indices,
    dspark_indices,
    global_topk_slots,
    image_visibility,
    paged_swa_indices,
)

SEQ, Q = [40, 33, 9, 300, 17], [5, 0, 9, 20, 1]
STARTS = int32([2, 7, 7, 16, 36, 37])


def table_for(P: int, lengths: list[int] = SEQ, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    columns = max(-(-n // P) for n in lengths)
    pages = torch.randperm(len(lengths) * columns, generator=g)
    return pages.reshape(len(lengths), columns).int()


def tokens(seq=SEQ, q=Q):
    return [(i, p) for i in range(len(seq)) for p in range(seq[i] - q[i], seq[i])]


def slot(table, i, position, P):
    return int(table[i, position // P]) * P + position % P


@pytest.mark.parametrize("P", [1, 2, 64, 256])
@pytest.mark.parametrize(("window", "width"), [(8, None), (128, None), (8, 8), (128, 192)])
def test_a_window_is_the_slots_of_its_positions(P, window, width):
    table = table_for(P)
    slots, lengths = paged_swa_indices(
        STARTS, int32(SEQ), table, page_size=P, window=window, width=width
    )
    assert slots.dtype == lengths.dtype == torch.int32
    assert slots.shape == (35, width or -(-window // 64) * 64)
    for t, (i, position) in enumerate(tokens()):
        seen = [p for p in range(SEQ[i]) if position - window < p <= position]
        assert int(lengths[t]) == len(seen)
        want = [slot(table, i, p, P) for p in seen]
        assert slots[t].tolist() == want + [-1] * (slots.shape[1] - len(seen))


def test_the_lists_width_is_not_the_window():
    # local-inference-lab/vllm#623; wrong: 192 entries from position 109 on.
    slots, lengths = paged_swa_indices(
        int32([0, 1]), int32([301]), int32([[0]]), page_size=512, window=128, width=192
    )
    assert lengths.tolist() == [128]
    assert slots[0].tolist() == [*range(173, 301), *[-1] * 64]


def test_each_token_of_a_draft_block_has_its_own_window():
    # flashinfer#4137; wrong: all three start at position 6.
    slots, _ = paged_swa_indices(
        int32([0, 3]), int32([10]), int32([[0]]), page_size=64, window=4, width=4
    )
    assert slots.tolist() == [[4, 5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9]]


def test_padding_sees_nothing():
    table = table_for(4)
    mapping = torch.arange(40)
    mapping[[0, 20, 35, 36, 37, 38, 39]] = -1
    slots, lengths = paged_swa_indices(
        STARTS, int32(SEQ), table, page_size=4, window=8, slot_mapping=mapping
    )
    plain, plain_lengths = paged_swa_indices(STARTS, int32(SEQ), table, page_size=4, window=8)
    assert slots.shape[0] == 40
    for t in range(40):
        if mapping[t] < 0:
            assert set(slots[t].tolist()) == {-1} and lengths[t] == 0
        else:
            assert torch.equal(slots[t], plain[t]) and lengths[t] == plain_lengths[t]


def test_images_and_replays_move_the_window():
    table, window, P = table_for(4), 8, 4
    images = [[(36, 39)], [], [(0, 8)], [(281, 299)], []]
    left, right = image_visibility(STARTS, int32(SEQ), images, max_image_tokens=19)
    replay = [36, 0, 0, 279, 0]
    slots, lengths = paged_swa_indices(
        STARTS,
        int32(SEQ),
        table,
        page_size=P,
        window=window,
        image_left=left,
        image_right=right,
        max_image_tokens=19,
        replay_start=replay,
    )
    assert slots.shape[1] == 64
    for t, (i, position) in enumerate(tokens()):
        seen = [
            p
            for p in range(replay[i], SEQ[i])
            if position - window < p <= position
            or any(a <= position <= b and a <= p <= b for a, b in images[i])
        ]
        assert slots[t, : lengths[t]].tolist() == [slot(table, i, p, P) for p in seen]


@pytest.mark.parametrize("P", [2, 64])
@pytest.mark.parametrize("window", [8, 128])
def test_a_dspark_block_sees_one_range_with_its_own_future(P, window):
    seq, q = [40, 33, 9, 300], [5, 0, 5, 3]
    table = table_for(P, seq)
    mapping = torch.tensor([0] * 12 + [-1, -1])
    slots, lengths = dspark_indices(
        int32([0, 5, 5, 10, 13]),
        int32(seq),
        table,
        page_size=P,
        window=window,
        num_spec=5,
        slot_mapping=mapping,
    )
    assert slots.shape == (14, -(-(window + 5) // 64) * 64)
    for t, (i, _) in enumerate(tokens(seq, q)):
        prefix = seq[i] - q[i]
        seen = [] if mapping[t] < 0 else range(max(prefix - window, 0), seq[i])
        assert int(lengths[t]) == len(seen) and (
            not seen or len(seen) == q[i] + min(prefix, window)
        )
        want = [slot(table, i, p, P) for p in seen]
        assert slots[t].tolist() == want + [-1] * (slots.shape[1] - len(want))
    assert set(slots[13].tolist()) == {-1} and lengths[13] == 0


@pytest.mark.parametrize("P", [1, 2, 64])
def test_entries_become_slots_in_place(P):
    g = torch.Generator().manual_seed(1)
    table = table_for(P, [150, 150, 150])
    topk = torch.full((20, 12), -1, dtype=torch.int32)
    request = torch.randint(0, 3, (20,), generator=g).int()
    valid = torch.rand(20, generator=g) < 0.7
    for t in range(20):
        n = int(torch.randint(0, 13, (), generator=g))
        topk[t, :n] = torch.randperm(150, generator=g)[:n].int()
    topk[~valid, 3] = -1  # a padded row's holes harm nobody
    slots, lengths = global_topk_slots(topk, request, table, page_size=P, is_valid_token=valid)
    for t in range(20):
        for c in range(12):
            entry = int(topk[t, c])
            want = -1 if entry < 0 else slot(table, int(request[t]), entry, P)
            assert int(slots[t, c]) == want
        assert int(lengths[t]) == (sum(e >= 0 for e in topk[t].tolist()) if valid[t] else 0)
    assert slots.dtype == lengths.dtype == torch.int32


def test_a_hole_before_an_entry_is_refused():
    # sglang#30645: the length would cut the last entry.
    arguments = (int32([0]), int32([[0, 1]]))
    with pytest.raises(
        ValueError, match=r"^topk_indices: -1 in column 1 of token 0, before others"
    ):
        global_topk_slots(int32([[2, -1, 0]]), *arguments, page_size=2)
    slots, lengths = global_topk_slots(int32([[2, 0, -7]]), *arguments, page_size=2)
    assert slots.tolist() == [[2, 0, -1]] and lengths.tolist() == [2]


@pytest.mark.parametrize("ratio", [2, 128])
def test_without_an_indexer_all_visible_entries_are_listed(ratio):
    lists = c128_topk_indices(STARTS, int32(SEQ), max_model_len=1024, compress_ratio=ratio)
    assert lists.dtype == torch.int32
    for t, (_, position) in enumerate(tokens()):
        n = sum((c + 1) * ratio - 1 <= position for c in range(300))
        assert lists[t].tolist() == list(range(n)) + [-1] * (lists.shape[1] - n)


@pytest.mark.parametrize(
    ("longest", "max_model_len", "width"),
    [
        (1, 1, 128),
        (128 * 128, 1 << 20, 128),
        (128 * 129, 1 << 20, 256),
        (128 * 257, 1 << 20, 512),
        (128 * 300, 128 * 300, 384),
        (128 * 300, 128 * 384 + 1, 512),
    ],
)
def test_the_width_is_a_power_of_two_within_the_models_length(longest, max_model_len, width):
    lists = c128_topk_indices(int32([0, 1]), int32([longest]), max_model_len=max_model_len)
    assert lists.shape == (1, width)
    assert int((lists >= 0).sum()) == longest // 128


@pytest.mark.parametrize("P", [2, 3])
def test_decodes_form_of_all_entries(P):
    positions, request = int32([0, 126, 127, 500, 1000]), int32([0, 1, 1, 0, 1])
    table = table_for(P, [9, 9])
    mapping = torch.tensor([5, 6, 7, -1, 9])
    slots, lengths = c128_global_slots(
        positions, request, table, page_size=P, width=8, slot_mapping=mapping
    )
    for t in range(5):
        n = (int(positions[t]) + 1) // 128
        want = [slot(table, int(request[t]), c, P) for c in range(n)]
        assert slots[t].tolist() == want + [-1] * (8 - n)
        assert int(lengths[t]) == (n if mapping[t] >= 0 else 0)


def test_what_an_engine_leaves_undefined_is_refused():
    one = int32([0, 1]), int32([301]), int32([[0]])
    with pytest.raises(ValueError, match=r"^width: 127; token 0 sees 128 positions"):
        paged_swa_indices(*one, page_size=512, width=127)
    with pytest.raises(ValueError, match=r"^replay_start: 302 for request 0, whose token 0"):
        paged_swa_indices(*one, page_size=512, replay_start=[302])
    assert paged_swa_indices(*one, page_size=512, replay_start=[301])[1].tolist() == [0]
    with pytest.raises(ValueError, match=r"^width: 64; token 0 sees 70 positions"):
        dspark_indices(
            int32([0, 70]), int32([70]), int32([[0]]), page_size=128, window=8, num_spec=8
        )
    with pytest.raises(ValueError, match=r"^block_table: 1 columns; position 173 of request 0"):
        paged_swa_indices(*one, page_size=128)
    with pytest.raises(ValueError, match=r"^block_table: page -1 at column 0"):
        paged_swa_indices(*one[:2], int32([[-1]]), page_size=512)
    with pytest.raises(
        ValueError, match=r"^block_table: page 33554432 of 64 gives slot 2147483648"
    ):
        paged_swa_indices(int32([0, 1]), int32([1]), int32([[1 << 25]]), page_size=64)
    with pytest.raises(ValueError, match=r"^slot_mapping: 7 for row 1; query_start_loc counts 1"):
        paged_swa_indices(*one, page_size=512, slot_mapping=int32([0, 7]))
    with pytest.raises(ValueError, match=r"^slot_mapping: shape \[0\]; accepted is \[T\]"):
        paged_swa_indices(*one, page_size=512, slot_mapping=int32([]))
    with pytest.raises(
        ValueError, match=r"^token_to_request: 1 for token 0; accepted are requests"
    ):
        global_topk_slots(int32([[0]]), int32([1]), int32([[0]]), page_size=2)
    with pytest.raises(ValueError, match=r"^block_table: 1 columns; position 2 of request 0 lies"):
        global_topk_slots(int32([[2]]), int32([0]), int32([[0]]), page_size=2)
    with pytest.raises(ValueError, match=r"^positions: 255 for token 0, which makes 2 entries"):
        c128_global_slots(int32([255]), int32([0]), int32([[0]]), page_size=2, width=1)
    with pytest.raises(
        ValueError, match=r"^max_seq_len: 301; accepted are 301, the longest length"
    ):
        c128_topk_indices(*one[:2], max_model_len=300)
