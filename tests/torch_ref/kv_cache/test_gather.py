"""The gather against one loop over positions, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_ref.kv_cache import PagedKV, empty_cache, gather_kv, insert_kv, position_slots, read_kv


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(kv_format: str, num_pages: int, P: int) -> PagedKV:
    """A cache whose every slot holds other values, all of them exact."""
    cache = empty_cache(kv_format, num_pages=num_pages, page_size=P, fill=0xFF)
    count = num_pages * P
    values = torch.arange(count)[:, None] * 8 + torch.arange(cache.d)[None] % 8
    mapping = torch.randperm(count, generator=torch.Generator().manual_seed(count)).int()
    return insert_kv(cache, (values % 16 - 8).bfloat16() * 2.0 ** (values % 5), mapping)


def workspace(n: int, M: int, D: int = 512) -> torch.Tensor:
    return torch.full((n, M, D), torch.nan, dtype=torch.bfloat16)


@pytest.mark.parametrize("kv_format", ["v4-fp8", "v3.2-fp8", "bf16", "bf16-576"])
@pytest.mark.parametrize("P", [1, 2, 7, 64])
def test_each_row_is_its_position_and_no_other_row_is_touched(kv_format, P):
    seq, count, offset, M = [9, 0, 130, 64], [4, 0, 70, 64], 3, 80
    pages = [-(-s // P) for s in seq]
    paged = filled(kv_format, sum(pages) + 2, P)
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((4, max(pages) + 1), -7, dtype=torch.int32)
    for b, needed in enumerate(pages):
        table[b, :needed] = int32([order.pop() for _ in range(needed)])
    before = workspace(4, M, paged.d)
    got = gather_kv(paged, table, int32(seq), before, gather_lens=int32(count), offset=offset)
    assert got is before
    for b in range(4):
        written = set()
        for i in range(count[b]):
            pos = seq[b] - count[b] + i
            slot = int(table[b, pos // P]) * P + pos % P
            assert torch.equal(got[b, offset + i], read_kv(paged, int32([slot]))[0])
            written.add(offset + i)
        assert all(got[b, row].isnan().all() for row in range(M) if row not in written)


def test_without_gather_lengths_everything_is_gathered():
    paged = filled("v4-fp8", 6, 2)
    table = int32([[5, 0, 3], [1, 2, 4]])
    got = gather_kv(paged, table, int32([5, 2]), workspace(2, 5))
    assert torch.equal(got[0], read_kv(paged, int32([10, 11, 0, 1, 6])))
    assert torch.equal(got[1, :2], read_kv(paged, int32([2, 3]))) and got[1, 2:].isnan().all()


def test_an_offset_gather_starts_with_the_first_page():
    # vllm#45377: a workspace offset of 16 read block_table[-1] for rows 0 to 15, marker page 9.
    paged = filled("v4-fp8", 10, 16)
    paged.region(paged.layout.raw)[9] = 0x42
    got = gather_kv(
        paged, int32([[7, 8, 9]]), int32([4]), torch.zeros(1, 20, 512).bfloat16(), offset=16
    )
    assert not got[0, :16].any()
    assert torch.equal(got[0, 16:], read_kv(paged, torch.arange(7 * 16, 7 * 16 + 4)))


def test_pages_that_no_gathered_position_needs_are_not_looked_at():
    paged = filled("v4-fp8", 4, 2)
    table = int32([[-1, 99, 3, -1]])
    got = gather_kv(paged, table, int32([6]), workspace(1, 2), gather_lens=int32([2]))
    assert torch.equal(got[0], read_kv(paged, int32([6, 7])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gather_lens": int32([7, 1])}, "gather_lens: 7 for request 0; accepted are 0 to its"),
        ({"gather_lens": int32([-1, 1])}, "gather_lens: -1 for request 0"),
        ({"offset": 5}, "gather_lens: 6 for request 0, which from row 5 on is past the workspace"),
        ({"offset": -1}, "offset: -1; accepted are 0 and more"),
        ({"seq_lens": int32([9, 1])}, "block_table: 4 columns; position 8 of request 0"),
        ({"block_table": int32([[0, 1, 2, 3], [4, 0, 0, 0]])}, "block_table: page 4 at column 0"),
        ({"block_table": int32([[0, -1, 2, 3], [0, 0, 0, 0]])}, "block_table: page -1 at column 1"),
        ({"block_table": int32([[0, 1, 2, 3]])}, "block_table: shape [1, 4]; accepted is [2, col"),
        ({"seq_lens": int32([6])}, "seq_lens: shape [1]; accepted is [2]"),
        ({"seq_lens": torch.tensor([6, 1])}, "seq_lens: dtype torch.int64; accepted is"),
        ({"workspace": workspace(2, 10, 576)}, "workspace: shape [2, 10, 576]; accepted is [n, M,"),
    ],
)
def test_what_would_read_or_write_elsewhere_is_refused(changes, message):
    arguments = {
        "block_table": int32([[0, 1, 2, 3], [3, 0, 0, 0]]),
        "seq_lens": int32([6, 1]),
        "workspace": workspace(2, 10),
        **changes,
    }
    with pytest.raises(ValueError) as error:
        gather_kv(filled("v4-fp8", 4, 2), **arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("page", "slot"), [(33554431, 2147483584), (33554432, None)])
def test_slots_past_int32_are_refused(page, slot):
    def find() -> torch.Tensor:
        return position_slots(int32([[page]]), int32([0]), int32([0]), page_size=64)

    if slot is not None:
        assert find().tolist() == [slot]
        return
    with pytest.raises(ValueError, match=r"page 33554432 of 64 gives slot 2147483648; accepted"):
        find()
