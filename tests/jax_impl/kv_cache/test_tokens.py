"""Single tokens: insert_kv and read_kv, against the bytes that the formats are made of."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.kv_cache import FORMATS, empty_cache, insert_kv, read_kv, read_scales
from tests.jax_impl.kv_cache.model import (
    BF16,
    WIDTHS,
    bits,
    int32,
    page_bytes,
    random_cache,
    same_bits,
    token_bits,
)

PAGE_SIZES = [1, 5, 64]


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_slot_is_read_from_its_page_and_offset(name, page_size):
    paged = random_cache(name, 3, page_size)
    slots = np.random.default_rng(0).permutation(3 * page_size).astype(np.int32)
    expected = np.stack([token_bits(paged, *divmod(int(slot), page_size)) for slot in slots])
    assert same_bits(read_kv(paged, slots), expected)
    assert same_bits(jax.jit(read_kv)(paged, slots), expected)


def test_slots_may_have_any_shape():
    paged = random_cache("v4-fp8", 3, 2)
    slots = int32([[0, 5, 2], [3, 3, 1]])
    rows = read_kv(paged, slots)
    assert rows.shape == (2, 3, 512) and rows.dtype == jnp.bfloat16
    assert same_bits(rows[1, 2], read_kv(paged, int32(1)))
    assert read_kv(paged, int32([])).shape == (0, 512)
    assert read_scales(paged, slots).shape == (2, 3, 7)


def test_inside_jit_a_slot_outside_reads_the_nearest_one():
    paged = random_cache("v4-fp8", 3, 2)
    got = jax.jit(read_kv)(paged, int32([-1, 6, 2**31 - 1, -(2**31)]))
    assert same_bits(got, read_kv(paged, int32([0, 5, 5, 0])))


@pytest.mark.parametrize("slot", [-1, 6, 2**31 - 1])
def test_outside_jit_a_slot_outside_is_refused(slot):
    paged = random_cache("v4-fp8", 3, 2)
    message = f"slots must lie between 0 and 5, the last slot of the cache; got {slot} at [1, 0]"
    for read in (read_kv, read_scales):
        with pytest.raises(ValueError, match=re.escape(message)):
            read(paged, int32([[0], [slot]]))


def exact_rows(count: int, width: int) -> np.ndarray:
    """Values that float8 and bfloat16 hold exactly, at the scale of a largest value of 448."""
    random = np.random.default_rng(3)
    rows = random.integers(-8, 9, (count, width)).astype(np.float32) * 32
    rows[:, ::32] = 448
    return rows


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_what_is_inserted_is_read_back_and_nothing_else_is_written(name, page_size):
    paged = random_cache(name, 4, page_size, seed=1)
    before = page_bytes(paged)
    slots = np.random.default_rng(4).permutation(4 * page_size)[: 2 * page_size].astype(np.int32)
    slots[0] = -1  # skipped
    rows = exact_rows(len(slots), paged.d)
    after = insert_kv(paged, rows, slots)
    kept = slots >= 0
    np.testing.assert_array_equal(np.asarray(read_kv(after, slots[kept]), np.float32), rows[kept])
    np.testing.assert_array_equal(page_bytes(paged), before)  # the cache handed over is not

    layout, changed = FORMATS[name], np.zeros(before.shape, bool)
    quantised = layout.quantised
    fields = [layout.plain, *layout.padding]
    fields += [] if quantised is None else [quantised.codes, quantised.scales]
    for slot in slots[kept]:
        for field in fields:
            first = layout.byte_offset(field, page_size, int(slot))
            changed.reshape(-1)[first : first + field.size] = True
    np.testing.assert_array_equal(page_bytes(after)[~changed], before[~changed])


@pytest.mark.parametrize("name", WIDTHS)
def test_bfloat16_rows_are_inserted_as_their_float32_values_are(name):
    paged, slots = empty_cache(name, num_pages=2, page_size=2), int32([3, 0, 2])
    rows = np.random.default_rng(8).standard_normal((3, paged.d)).astype(BF16)
    np.testing.assert_array_equal(
        page_bytes(insert_kv(paged, rows, slots)),
        page_bytes(insert_kv(paged, rows.astype(np.float32), slots)),
    )


def test_a_v4_token_is_written_with_a_zero_in_its_padding():
    paged = empty_cache("v4-fp8", num_pages=2, page_size=3, fill=0xA5)
    pages = page_bytes(insert_kv(paged, exact_rows(2, 512), int32([1, 5])))
    pads = pages[:, 3 * 576 + 7 : 3 * 584 : 8]
    np.testing.assert_array_equal(pads, [[0xA5, 0, 0xA5], [0xA5, 0xA5, 0]])
    assert (pages[:, 3 * 584 :] == 0xA5).all()  # padding of the page


def test_rows_that_are_not_quantised_are_rounded_to_bfloat16():
    rows = np.random.default_rng(5).standard_normal((4, 512)).astype(np.float32)
    expected = rows.astype(BF16)
    for name, first in (("bf16", 0), ("v4-fp8", 448)):
        paged = insert_kv(empty_cache(name, num_pages=2, page_size=2), rows, int32([0, 1, 2, 3]))
        got = read_kv(paged, int32([0, 1, 2, 3]))
        np.testing.assert_array_equal(bits(got)[:, first:], bits(expected)[:, first:])


def test_inside_jit_slots_that_there_are_not_are_skipped():
    paged = random_cache("v4-fp8", 2, 2)
    rows = exact_rows(5, 512)
    got = jax.jit(insert_kv)(paged, rows, int32([-1, 4, 2, -7, 2**31 - 1]))
    np.testing.assert_array_equal(
        page_bytes(got), page_bytes(insert_kv(paged, rows[2:3], int32([2])))
    )


PAGED = empty_cache("v4-fp8", num_pages=2, page_size=2)
ROWS = np.zeros((3, 512), np.float32)
SLOTS = int32([0, 1, 2])

BAD: list[tuple[dict[str, Any], str]] = [
    ({"paged": PAGED.cache}, "paged must be a PagedKV; got ArrayImpl"),
    ({"values": ROWS[:, :511]}, "values must be 512 wide for v4-fp8; got 511"),
    ({"values": ROWS.astype(np.float64)}, "values must be bfloat16 or float32; got float64"),
    ({"values": ROWS[0]}, "values must be [N, D]; got shape [512]"),
    ({"slot_mapping": SLOTS.astype(np.int64)}, "slot_mapping must be int32; got int64"),
    ({"slot_mapping": SLOTS[:2]}, "slot_mapping must have a slot for each of the 3 rows"),
    ({"slot_mapping": int32([0, 4, 1])}, "slot_mapping must lie between -1 (skipped) and 3"),
    ({"slot_mapping": int32([0, -2, 1])}, "slot_mapping must lie between -1 (skipped) and 3"),
    ({"slot_mapping": int32([3, 1, 3])}, "slot_mapping must name a slot once; got 3 for 2 tokens"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_cannot_be_inserted_is_refused_by_name(changes, message):
    arguments: dict[str, Any] = dict(paged=PAGED, values=ROWS, slot_mapping=SLOTS) | changes
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        insert_kv(**arguments)


def test_several_skipped_tokens_are_no_double_slot():
    insert_kv(PAGED, ROWS, int32([-1, 0, -1]))


def test_a_64_bit_slot_is_refused_and_not_wrapped():
    with pytest.raises(ValueError, match="slots must be int32; got int64"):
        read_kv(PAGED, np.array([2**31 + 5]))


@pytest.mark.parametrize("read", [read_kv, read_scales])
def test_a_scalar_that_is_no_array_is_said_to_be_none(read):
    with pytest.raises(ValueError, match=r"slots must be an array; got a NumPy scalar, .*3"):
        read(PAGED, np.int32(3))
    assert read(PAGED, np.asarray(np.int32(0))).ndim == 1


def test_a_format_without_scales_has_none_to_read():
    with pytest.raises(ValueError, match="paged must be in a format with scales; bf16 has none"):
        read_scales(empty_cache("bf16", num_pages=1, page_size=1), int32([0]))


def test_a_cache_without_slots_serves_nothing_but_empty_lists():
    paged = empty_cache("v4-fp8", num_pages=0, page_size=2)
    assert read_kv(paged, int32([])).shape == (0, 512)
    with pytest.raises(ValueError, match="slots must lie between 0 and -1"):
        read_kv(paged, int32([0]))
    assert insert_kv(paged, ROWS, int32([-1, -1, -1])).num_slots == 0
