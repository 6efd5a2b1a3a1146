"""PagedKV: what it accepts, and that it is a pytree."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl
from jax_impl.kv_cache import FORMATS, PagedKV, empty_cache
from tests.jax_impl.kv_cache.model import BF16


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_an_empty_cache_has_its_format_and_fill(name, page_size):
    paged = empty_cache(name, num_pages=3, page_size=page_size, fill=0xA5)
    assert (paged.num_pages, paged.num_slots) == (3, 3 * page_size)
    assert paged.d == FORMATS[name].d
    assert paged.cache.shape == FORMATS[name].cache_shape(3, page_size)
    assert (np.asarray(paged.cache).view(np.uint8) == 0xA5).all()
    assert isinstance(paged.cache, jax.Array)


def test_a_cache_passes_through_jit_with_its_page_size_and_format():
    paged = empty_cache("v4-fp8", num_pages=2, page_size=2)
    seen = []

    @jax.jit
    def touch(paged):
        seen.append((paged.page_size, paged.kv_format, paged.num_slots, paged.d))
        return jax.tree.map(lambda cache: cache + 1, paged)

    result = touch(paged)
    assert seen == [(2, "v4-fp8", 4, 512)]
    assert isinstance(result, PagedKV) and (np.asarray(result.cache) == 1).all()
    assert jax.tree.structure(result) == jax.tree.structure(paged)


def test_a_torch_tensor_is_taken():
    import torch

    paged = PagedKV(torch.full((2, 1728), 7, dtype=torch.uint8), 2, "v4-fp8")
    assert isinstance(paged.cache, jax.Array) and (np.asarray(paged.cache) == 7).all()


V4_PAGES = np.zeros((2, 1728), np.uint8)

BAD = [
    ((V4_PAGES, 2, "v4"), "kv_format must be one of"),
    ((V4_PAGES, 0, "v4-fp8"), "page_size must be an integer >= 1; got 0"),
    ((V4_PAGES, True, "v4-fp8"), "page_size must be an integer >= 1; got True"),
    ((V4_PAGES, 2.0, "v4-fp8"), "page_size must be an integer >= 1; got 2.0"),
    ((V4_PAGES, 4_000_000, "v4-fp8"), "page_size must leave a page of v4-fp8 under 2^31 bytes"),
    # Bytes never say how many tokens a page has, not even where just one number fits.
    ((V4_PAGES, 1, "v4-fp8"), "cache must be [2, 1152] for pages of 1 tokens of v4-fp8"),
    ((V4_PAGES[:, :1168], 2, "v4-fp8"), "cache must be [2, 1728] for pages of 2"),
    ((V4_PAGES.astype(np.int8), 2, "v4-fp8"), "cache must be uint8; got int8"),
    ((V4_PAGES[0], 2, "v4-fp8"), "cache must be [num_pages, page_stride]; got shape [1728]"),
    ((V4_PAGES, 2, "bf16"), "cache must be bfloat16; got uint8"),
    ((np.zeros((2, 64, 576), BF16), 64, "bf16"), "cache must be [2, 64, 512] for pages of 64"),
    ((np.zeros((2, 64, 512), BF16), 32, "bf16"), "cache must be [2, 32, 512] for pages of 32"),
    (([[0]], 2, "v4-fp8"), "cache must be an uint8 array [num_pages, page_stride]; got list"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_is_no_cache_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        PagedKV(*arguments)


def test_more_slots_than_an_int32_counts_are_refused():
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 slots.*got 33554432 pages of 64"):
        empty_cache("v4-fp8", num_pages=2**25, page_size=64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": -1}, "num_pages must be an integer >= 0; got -1"),
        ({"fill": 256}, "fill must be a byte, 0 to 255; got 256"),
        ({"fill": -1}, "fill must be a byte"),
        ({"page_size": 0}, "page_size must be an integer >= 1"),
    ],
)
def test_an_empty_cache_that_cannot_be_made_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        empty_cache("bf16", **({"num_pages": 1, "page_size": 2} | changes))


def test_a_fill_of_ones_makes_every_read_nan():
    for name in FORMATS:
        paged = empty_cache(name, num_pages=1, page_size=2, fill=0xFF)
        assert jnp.isnan(jax_impl.kv_cache.read_kv(paged, np.arange(2, dtype=np.int32))).all()
