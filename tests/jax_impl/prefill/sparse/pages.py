"""Paged caches for the tests of prefill that reads pages, and their rows as a matrix."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jax_impl.kv_cache import FORMATS, PagedKV, read_kv

LAYOUT = FORMATS["v4-fp8"]
CODES, PLAIN_BYTES, GROUPS = 448, 128, 7
NAN_CODES = (0x7F, 0xFF)


def random_tokens(count: int, seed: int, scales: tuple[int, int] = (116, 122)) -> np.ndarray:
    """Tokens as [count, 584] bytes: codes, bfloat16 columns, scales in a range, padding.

    No code is NaN; numbers are of the order of 1; the padding byte is rubbish.
    """
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 256, (count, LAYOUT.token_bytes), dtype=np.uint8)
    codes = tokens[:, :CODES]
    codes[np.isin(codes, NAN_CODES)] = 0x38
    plain = random.standard_normal((count, PLAIN_BYTES // 2)).astype(ml_dtypes.bfloat16)
    tokens[:, CODES : CODES + PLAIN_BYTES] = plain.view(np.uint8)
    tokens[:, -8:-1] = random.integers(*scales, (count, GROUPS))
    return tokens


def cache_of(tokens: np.ndarray, page_size: int) -> PagedKV:
    """Full pages of tokens; whatever lies behind them on a page is NaN as codes."""
    num_pages = len(tokens) // page_size
    assert num_pages * page_size == len(tokens)
    pages = np.full((num_pages, LAYOUT.page_stride(page_size)), 0xFF, np.uint8)
    data = tokens[:, :-8].reshape(num_pages, -1)
    scales = tokens[:, -8:].reshape(num_pages, -1)
    pages[:, : data.shape[1]] = data
    pages[:, data.shape[1] : data.shape[1] + scales.shape[1]] = scales
    return PagedKV(pages, page_size, LAYOUT.name)


def random_caches(*sizes: tuple[int, int], seed: int = 0) -> tuple[PagedKV, ...]:
    """Caches of (num_pages, page_size)."""
    return tuple(
        cache_of(random_tokens(pages * size, seed + number), size)
        for number, (pages, size) in enumerate(sizes)
    )


def rows_of(caches: Any) -> np.ndarray:
    """All slots of all caches, dequantised, as one matrix."""
    return np.concatenate(
        [np.asarray(read_kv(c, np.arange(c.num_slots, dtype=np.int32))) for c in caches]
    )
