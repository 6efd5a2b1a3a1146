"""Known deviations from the V4 path: which keys a token is given instead, and what is read."""

from __future__ import annotations

import pytest
import torch

from tests.torch_ref.v4.problems import V4Problem, int32, v4_problem
from torch_ref import v4_prefill
from torch_ref.kv_cache import insert_kv
from torch_ref.kv_cache.cache import PagedKV
from torch_ref.v4.flat import flatten
from torch_ref.v4.inputs import V4Inputs, check_v4_inputs
from torch_ref.v4.misreading import read_keys
from torch_ref.v4.variants import (
    COMPRESSED,
    NOTHING,
    RIGHT,
    WINDOW,
    V4Variant,
    chunk_of,
    variant_call,
    variant_keys,
    workspace_rows,
)

# One chunk: N = 15, M = 15 + 11. Token 3 is request 1's third, at position 32: 4 entries of 8,
# positions 25 to 32; token 7 is request 2's, at position 60. The window has 8 positions, and the
# first of request 1 that is gathered is 23.
BATCH = ([9, 33, 61], [1, 3, 4])
M, N = 26, 15


def problem(**options: object) -> tuple[V4Problem, V4Inputs, tuple]:
    made = v4_problem(*BATCH, ratio=4, topk=4, chunk_size=4, **options)  # type: ignore[arg-type]
    plan = v4_prefill(**made.everything).plan
    assert [(c.compressed_rows, c.workspace_rows) for c in plan] == [(N, M)]
    return made, check_v4_inputs(**made.arguments), plan


@pytest.fixture(scope="module", name="batch")
def batch_fixture() -> tuple[V4Inputs, tuple]:
    return problem()[1:]


def keys(batch: tuple[V4Inputs, tuple], token: int, through: str = "cache", **fields: object):
    """{(kind, request): numbers in order} of a token's keys."""
    found: dict[tuple[int, int], list[int]] = {}
    variant = V4Variant(**fields)  # type: ignore[arg-type]
    assert variant.possible(through)  # type: ignore[arg-type]
    for kind, request, number in variant_keys(
        *(batch[0], variant, batch[1], token),
        through=through,  # type: ignore[arg-type]
    ).tolist():
        found.setdefault((kind, request), []).append(number)
    return found


def listed(batch: tuple[V4Inputs, tuple], token: int) -> list[int]:
    assert batch[0].topk_indices is not None
    return batch[0].topk_indices[token].tolist()


@pytest.mark.parametrize("through", ["workspace", "cache"])
@pytest.mark.parametrize("kv_format", ["v4-fp8", "bf16"])
def test_without_a_deviation_it_is_the_flat_call(through, kv_format):
    images = [[], [(31, 32)], [(57, 59), (58, 60)]]
    _, inputs, plan = problem(kv_format=kv_format, images=images, max_image=4, offset=5)
    flat = flatten(inputs)
    order = [5, 0, 7, 3]
    call, unknown = variant_call(inputs, RIGHT, plan, order, through=through)
    assert not unknown.any()
    for row, t in enumerate(order):
        n = int(flat.topk_length[t])
        assert int(call.topk_length[row]) == n
        mine, due = call.kv[call.indices[row, :n].long()], flat.kv[flat.indices[t, :n].long()]
        assert torch.equal(mine, due)
        assert (call.indices[row, n:] == -1).all()


def test_each_key_is_held_once(batch):
    call, _ = variant_call(batch[0], RIGHT, batch[1], [1, 2, 3, 3], through="cache")
    assert len(call.kv) < int(call.topk_length.sum())
    assert torch.equal(call.indices[2], call.indices[3])


def test_windows_that_are_too_long_short_or_early(batch):
    own = {(COMPRESSED, 1): listed(batch, 3), (WINDOW, 1): list(range(25, 33))}
    assert keys(batch, 3) == own
    for fields, positions in (
        ({"window_shift": 1}, range(24, 33)),
        ({"window_shift": -1}, range(26, 33)),
        ({"ahead": 1}, range(25, 34)),
        ({"position_shift": -1}, range(24, 32)),
        ({"position_shift": "queries"}, range(22, 30)),
    ):
        assert keys(batch, 3, **fields) == own | {(WINDOW, 1): list(positions)}


def test_the_row_before_the_gathered_positions_is_the_compressed_region_s(batch):
    # Token 1, at position 30, sees 23 to 30; 22 would be row N - 1 = 14, and 8 rows are entries.
    found = keys(batch, 1, "workspace", window_shift=1)
    assert found[(NOTHING, 1)] == [33 - 10 + 14 - N]
    assert found[(WINDOW, 1)] == list(range(23, 31))


def test_a_length_without_this_step_s_tokens(batch):
    # Position 32 becomes 29: 7 entries, of which the list has 4, and positions 22 to 29.
    assert keys(batch, 3, lengths="prefix") == {
        (COMPRESSED, 1): listed(batch, 3),
        (WINDOW, 1): list(range(22, 30)),
    }
    # Request 0's only token is at 8, and then at 7: still the same two entries.
    assert keys(batch, 0, lengths="prefix")[(WINDOW, 0)] == list(range(8))


def test_parts_left_out_and_entries_counted_late(batch):
    assert keys(batch, 3, entries="left_out") == {(WINDOW, 1): list(range(25, 33))}
    assert keys(batch, 3, window_keys="left_out") == {(COMPRESSED, 1): listed(batch, 3)}
    # Token 0, at position 8: 9 // 4 = 2 entries, and 8 // 4 = 2. At position 7 it is 2 and 1.
    early = v4_problem([8], [1], ratio=4, topk=4)
    inputs, plan = check_v4_inputs(**early.arguments), v4_prefill(**early.everything).plan
    assert len(keys((inputs, plan), 0)[(COMPRESSED, 0)]) == 2
    assert len(keys((inputs, plan), 0, entries="late")[(COMPRESSED, 0)]) == 1


def test_an_uncut_list_reaches_the_row_before_the_request_s_own(batch):
    # Request 0's token has 2 entries and two -1: rows -1, which are no rows. Request 1's tokens
    # fill their lists.
    rows = workspace_rows(batch[0], V4Variant(entries="uncut"), chunk_of(batch[1], 0), 0).tolist()
    assert rows == [*listed(batch, 0)[:2], -1, -1, *range(N, N + 8)]
    assert keys(batch, 0, "workspace", entries="uncut") == keys(batch, 0)


def test_requests_that_are_mixed_up(batch):
    entries, positions = listed(batch, 3), list(range(25, 33))
    for which, request in (("first", 0), ("next", 2), ("previous", 0)):
        assert keys(batch, 3, request=which) == {
            (COMPRESSED, request): entries,
            (WINDOW, request): positions,
        }
    assert keys(batch, 7, request="next") == {  # around the end
        (COMPRESSED, 0): listed(batch, 7),
        (WINDOW, 0): list(range(53, 61)),
    }
    assert keys(batch, 3, entries_of="next") == {
        (COMPRESSED, 2): entries,
        (WINDOW, 1): positions,
    }


def test_rows_of_a_base_that_is_missing_or_counted_twice(batch):
    chunk = chunk_of(batch[1], 3)
    window = torch.arange(2, 10) + N
    for which, base in (("first", 0), ("doubled", 2 * M), ("next", 2 * M), ("previous", 0)):
        rows = workspace_rows(batch[0], V4Variant(request=which), chunk, 3).tolist()  # type: ignore[arg-type]
        assert rows == [base + c for c in listed(batch, 3)] + (base + window).tolist()
    # Token 7's base counted twice is past the workspace: no key is left.
    assert keys(batch, 7, "workspace", request="doubled") == {}


def test_rows_of_an_offset_that_is_missing_or_counted_twice(batch):
    chunk = chunk_of(batch[1], 3)
    for which, offset in (("missing", 0), ("doubled", 2 * N)):
        rows = workspace_rows(batch[0], V4Variant(offset=which), chunk, 3)  # type: ignore[arg-type]
        assert rows[4:].tolist() == [M + offset + row for row in range(2, 10)]
    found = keys(batch, 3, "workspace", offset="missing")
    # Entries 2 to 7, and two rows that nothing is gathered to.
    assert found[(COMPRESSED, 1)] == listed(batch, 3) + list(range(2, 8))
    assert len(found[(NOTHING, 1)]) == 2


def test_slots_behind_a_list_as_the_last_row(batch):
    rows = workspace_rows(batch[0], V4Variant(empty_slots="last_row"), chunk_of(batch[1], 3), 3)
    assert len(rows) == 128
    assert (rows[12:] == 3 * M - 1).all()
    # It is request 2's last position.
    assert keys(batch, 3, "workspace", empty_slots="last_row")[(WINDOW, 2)] == [60] * 116


def test_what_cannot_be_told_is_marked(batch):
    inputs, plan = batch
    for fields, through, tokens in (
        # Row 14 is an entry of request 2 alone; rows 0 to 7 are all entries of request 1.
        ({"window_shift": 1}, "workspace", [0, 1]),
        ({"offset": "missing"}, "workspace", [0, 2, 3]),
        # Position -1, and positions that the neighbour doesn't have.
        ({"position_shift": -2}, "cache", [0]),
        ({"request": "previous"}, "cache", [1, 2, 3, 4, 5, 6, 7]),
    ):
        variant = V4Variant(**fields)  # type: ignore[arg-type]
        _, unknown = variant_call(inputs, variant, plan, range(8), through=through)  # type: ignore[arg-type]
        assert unknown.nonzero()[:, 0].tolist() == tokens, fields


def test_an_image_that_is_ignored():
    _, inputs, plan = problem(images=[[], [(31, 32)], []], max_image=2)
    assert keys((inputs, plan), 2)[(WINDOW, 1)] == list(range(24, 33))
    assert keys((inputs, plan), 2, image="ignored")[(WINDOW, 1)] == list(range(24, 32))


def test_a_token_of_no_chunk_is_refused(batch):
    with pytest.raises(ValueError, match="plan: no chunk holds token 8"):
        variant_keys(batch[0], RIGHT, batch[1], 8, through="workspace")


def test_which_way_a_deviation_is_possible():
    for fields in ({"offset": "missing"}, {"request": "doubled"}, {"entries": "uncut"}):
        variant = V4Variant(**fields)  # type: ignore[arg-type]
        assert variant.possible("workspace") and not variant.possible("cache")
    for fields in ({"position_shift": 1}, {"reading": "interleaved"}):
        variant = V4Variant(**fields)  # type: ignore[arg-type]
        assert variant.possible("cache") and not variant.possible("workspace")


def stored_batch(P: int = 4) -> tuple[V4Inputs, torch.Tensor]:
    """One request of 8 positions on two pages, and their rows; scales 2^-4 and 2^-1 in turn."""
    made = v4_problem([8], [1], ratio=1, window=8, page=P)
    values = torch.randn(8, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    values[:, :448] = values[:, :448].clamp(-1, 1)
    values[:, 0:448:64] = 20.0
    values[1::2, :448] *= 8
    table = made.arguments["swa_block_table"]
    paged = PagedKV(made.arguments["swa_cache"], P, "v4-fp8")
    slots = int32([int(table[0, p // P]) * P + p % P for p in range(8)])
    written = insert_kv(paged, values, slots)
    return check_v4_inputs(**made.but(swa_cache=written.cache).arguments), values


def read(inputs: V4Inputs, reading: str, numbers: list[int]) -> torch.Tensor:
    asked = torch.tensor([[WINDOW, 0, n] for n in numbers])
    rows, there = read_keys(inputs, asked, reading)  # type: ignore[arg-type]
    assert there.all()
    return rows


def test_scales_of_a_neighbour_or_of_nobody():
    inputs, _ = stored_batch()
    right = read(inputs, "right", [0, 1, 2])
    # Odd positions have eight times the scale of even ones; rope has none.
    for reading, factor in (("next_scales", 8), ("previous_scales", 8)):
        wrong = read(inputs, reading, [2])
        assert torch.equal(wrong[0, :448], right[2, :448] * factor)
        assert torch.equal(wrong[0, 448:], right[2, 448:])
    ignored = read(inputs, "scales_ignored", [1])
    assert torch.equal(ignored[0, :448] * 0.5, right[1, :448])


def test_scales_for_128_columns():
    inputs, _ = stored_batch()
    scales = inputs.swa.region(inputs.swa.layout.scales)  # type: ignore[arg-type]
    page = int(inputs.swa_block_table[0, 0])
    right = read(inputs, "right", [0])
    assert torch.equal(read(inputs, "groups_of_128", [0]), right)
    scales[page, 0] = torch.arange(120, 127, dtype=torch.uint8)
    wrong, due = read(inputs, "groups_of_128", [0]), read(inputs, "right", [0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3]) - torch.arange(7)
    factor = (2.0**groups).repeat_interleave(64).bfloat16()
    assert torch.equal(wrong[0, :448], due[0, :448] * factor)


def test_pages_as_tokens_side_by_side_and_without_padding():
    inputs, _ = stored_batch()
    stored, P = inputs.swa.cache, inputs.swa.page_size
    page = int(inputs.swa_block_table[0, 0])
    other = stored[page, 584 : 584 + 448]
    wrong = read(inputs, "interleaved", [1])[0]
    scale = 2.0 ** (stored[page, 584 + 576 : 584 + 583].double() - 127)
    due = other.view(torch.float8_e4m3fn).double() * scale.repeat_interleave(64)
    assert torch.equal(wrong[:448].isnan(), due.isnan())
    assert torch.equal(wrong[:448].nan_to_num(), due.bfloat16().nan_to_num())
    assert torch.equal(wrong[448:].view(torch.int16).view(torch.uint8), stored[page, 1032:1160])

    flat = torch.cat([stored.flatten(), torch.full((8192,), 0xFF, dtype=torch.uint8)])
    start = page * P * 584
    wrong = read(inputs, "unpadded_stride", [0])[0]
    assert torch.equal(
        wrong[448:].view(torch.int16).view(torch.uint8), flat[start + 448 : start + 576]
    )
    assert stored.shape[1] > P * 584


def test_what_is_not_there_is_nan_and_said_to_be_missing():
    inputs, _ = stored_batch()
    asked = torch.tensor([[WINDOW, 0, 7], [WINDOW, 0, -1], [WINDOW, 0, 999], [NOTHING, 0, 2]])
    rows, there = read_keys(inputs, asked, "right")
    assert there.tolist() == [True, False, False, False]
    assert rows[1:].isnan().all()
    assert not rows[0].isnan().any()
