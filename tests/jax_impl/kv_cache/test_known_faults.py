"""Faults that software of this kind has had, each with the value that is right.

Reports are named by repository and number; inputs are this project's own. Those of quantising
stand in test_quantise.py, the 32-bit byte offsets in test_formats.py and test_kernel_lowering.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.kv_cache import PagedKV, empty_cache, gather_kv, insert_kv
from tests.jax_impl.kv_cache.model import BF16, bits, int32, page_bytes, poison


def marked_cache(num_pages: int, page_size: int) -> PagedKV:
    """Each page's tokens hold its number in all columns."""
    rows = np.arange(num_pages, dtype=np.float32).repeat(page_size)
    slots = np.arange(num_pages * page_size, dtype=np.int32)
    paged = empty_cache("v4-fp8", num_pages=num_pages, page_size=page_size)
    return insert_kv(paged, np.tile(rows[:, None], (1, 512)), slots)


def test_rows_before_the_first_token_read_no_page(backend):
    """vllm#45377: a start behind the row made the offset negative, which wraps to page 9."""
    paged, table = marked_cache(10, 16), int32([[7, 8, 9]])
    workspace = np.zeros((1, 20, 512), BF16)
    got = np.asarray(
        gather_kv(paged, table, int32([4]), workspace, offset=16, backend=backend), np.float32
    )
    assert not got[0, :16].any()
    assert (got[0, 16:] == 7).all()
    with pytest.raises(ValueError, match="gather_lens must lie between 0 and the request's seq_le"):
        gather_kv(paged, table, int32([4]), workspace, gather_lens=int32([20]), backend=backend)


@pytest.mark.parametrize("stale", [np.nan, np.inf])
def test_unfilled_slots_of_the_last_page_stay_out_and_a_nan_in_a_filled_one_stays_in(
    backend, stale
):
    """flashinfer#941: 70 tokens on pages of 64, the other 58 slots of the second page unfilled."""
    rows = np.ones((128, 512), np.float32)
    rows[70:] = stale
    rows[3] = np.nan
    paged = insert_kv(
        empty_cache("bf16", num_pages=2, page_size=64), rows, np.arange(128, dtype=np.int32)
    )
    got = gather_kv(
        paged, int32([[0, 1]]), int32([70]), np.zeros((1, 80, 512), BF16), backend=backend
    )
    got = np.asarray(got, np.float32)[0]
    assert np.isnan(got[3]).all()
    assert (np.delete(got[:70], 3, axis=0) == 1).all()
    assert not got[70:].any()


@pytest.mark.parametrize("name", ["v4-fp8", "v3.2-fp8", "bf16"])
def test_the_same_tokens_on_pages_of_1_2_and_64_are_gathered_alike(backend, name):
    """sglang-jax#1074: a page size that was read off the shape, and wrong for pages of 1."""
    results = []
    for page_size in (1, 2, 64):
        paged = empty_cache(name, num_pages=-(-64 // page_size), page_size=page_size, fill=0xFF)
        rows = np.random.default_rng(7).standard_normal((64, paged.d)).astype(np.float32)
        page = np.random.default_rng(page_size).permutation(paged.num_pages).astype(np.int32)
        position = np.arange(64)
        slots = page[position // page_size] * page_size + position % page_size
        paged = insert_kv(paged, rows, slots.astype(np.int32))
        got = gather_kv(
            paged, page[None], int32([61]), poison(1, 33, paged.d), gather_lens=int32([30]),
            offset=2, backend=backend,
        )  # fmt: skip
        results.append(bits(got))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert np.isfinite(results[0][0, 2:32].view(BF16).astype(np.float32)).all()


def test_a_short_request_leaves_the_rows_between_its_regions_alone(backend):
    """The second request of a chunk has no compressed entry: its rows [0, N) keep their NaN."""
    paged = marked_cache(4, 2)
    workspace = poison(2, 6, 512)
    got = gather_kv(paged, int32([[1, 2], [-1, -1]]), int32([4, 0]), workspace, backend=backend)
    assert (np.asarray(got, np.float32)[0, :4] == [[1.0]] * 2 + [[2.0]] * 2).all()
    np.testing.assert_array_equal(bits(got)[1], bits(workspace)[1])
    np.testing.assert_array_equal(bits(got)[0, 4:], bits(workspace)[0, 4:])


def test_a_token_without_a_slot_is_not_inserted():
    """Slot -1 is no slot; in JAX it would be the cache's last."""
    paged = empty_cache("v4-fp8", num_pages=3, page_size=2, fill=0xA5)
    after = insert_kv(paged, np.ones((2, 512), np.float32), int32([-1, -1]))
    np.testing.assert_array_equal(page_bytes(after), page_bytes(paged))


def test_64_bit_indices_are_refused_before_jax_can_wrap_them():
    """2^31 + 5 would become -2147483643."""
    far = np.array([2**31 + 5])
    assert int(jnp.asarray(far, jnp.int32)[0]) == -2147483643
    paged = marked_cache(2, 2)
    with pytest.raises(ValueError, match="block_table must be int32; got int64"):
        gather_kv(paged, far[None], int32([1]), np.zeros((1, 1, 512), BF16))
    with pytest.raises(ValueError, match="slot_mapping must be int32; got int64"):
        insert_kv(paged, np.zeros((1, 512), np.float32), far)
