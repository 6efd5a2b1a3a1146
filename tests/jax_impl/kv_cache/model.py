"""What the formats and the gather mean, token by token in NumPy, from their description alone.

Offsets are written out here and not taken from the table that is tested; products are made in
float64 and rounded once.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jax_impl.kv_cache import PagedKV

CPU_BACKENDS = ("xla", "pallas-interpret")

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
WIDTHS = {"v4-fp8": 512, "v3.2-fp8": 576, "bf16": 512, "bf16-576": 576}
STRIDES = {
    "v4-fp8": lambda p: -(-p * 584 // 576) * 576,
    "v3.2-fp8": lambda p: p * 656,
    "bf16": lambda p: p * 1024,
    "bf16-576": lambda p: p * 1152,
}


def random_cache(kv_format: str, num_pages: int, page_size: int, seed: int = 0) -> PagedKV:
    """Every byte random: all codes, NaN too; scales within what a writer stores."""
    random = np.random.default_rng(seed)
    stride = STRIDES[kv_format](page_size)
    pages = random.integers(0, 256, (num_pages, stride), dtype=np.uint8)
    for page in pages:
        for token in range(page_size):
            if kv_format == "v4-fp8":
                first = page_size * 576 + token * 8
                page[first : first + 7] = random.integers(105, 150, 7)
            elif kv_format == "v3.2-fp8":
                scales = random.uniform(0.001, 4, 4).astype(np.float32)
                page[token * 656 + 512 : token * 656 + 528] = scales.view(np.uint8)
    return as_paged(pages, kv_format, page_size)


def as_paged(pages: np.ndarray, kv_format: str, page_size: int) -> PagedKV:
    """A cache of pages given as bytes, in whatever form the format has them."""
    if kv_format.startswith("bf16"):
        pages = pages.view(BF16).reshape(len(pages), page_size, WIDTHS[kv_format])
    return PagedKV(pages, page_size, kv_format)


def page_bytes(paged: PagedKV) -> np.ndarray:
    """[num_pages, stride] uint8, a copy."""
    cache = np.asarray(paged.cache)
    return cache.reshape(paged.num_pages, -1).view(np.uint8).copy()


def token_bits(paged: PagedKV, page: int, token: int) -> np.ndarray:
    """The bfloat16 bits of one token's row, as uint16."""
    data, size = page_bytes(paged)[page], paged.page_size
    if paged.kv_format == "v4-fp8":
        row = data[token * 576 : (token + 1) * 576]
        scales = data[size * 576 + token * 8 :][:7].astype(np.float64)
        scale = np.where(scales == 255, np.nan, np.exp2(scales - 127)).repeat(64)
        return np.concatenate([_products(row[:448], scale), row[448:].view(np.uint16)])
    if paged.kv_format == "v3.2-fp8":
        row = data[token * 656 : (token + 1) * 656]
        scale = row[512:528].view(np.float32).repeat(128)
        return np.concatenate([_products(row[:512], scale), row[528:].view(np.uint16)])
    width = 2 * WIDTHS[paged.kv_format]
    return data[token * width : (token + 1) * width].view(np.uint16)


def _products(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """code * scale rounded to float32, then to bfloat16; a product of float8s is exact before."""
    product = codes.view(E4M3).astype(np.float64) * scale
    with np.errstate(over="ignore"):
        return product.astype(np.float32).astype(BF16).view(np.uint16)


def gathered_bits(
    paged: PagedKV,
    block_table: Any,
    seq_lens: Any,
    workspace: Any,
    gather_lens: Any = None,
    offset: int = 0,
) -> np.ndarray:
    """The workspace after a gather, as uint16."""
    result = bits(workspace).copy()
    gather_lens = seq_lens if gather_lens is None else gather_lens
    for b, (seq, gather) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        for i in range(gather):
            position = int(seq) - int(gather) + i
            page = int(block_table[b][position // paged.page_size])
            result[b, offset + i] = token_bits(paged, page, position % paged.page_size)
    return result


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


def same_bits(got: Any, expected: Any) -> bool:
    """Bit for bit, except that a NaN computed from codes may have any payload."""
    got, expected = bits(got), bits(expected)
    nan = np.isnan(got.view(BF16).astype(np.float32))
    both = nan & np.isnan(expected.view(BF16).astype(np.float32))
    return got.shape == expected.shape and bool(((got == expected) | both).all())


def poison(*shape: int) -> np.ndarray:
    """bfloat16 NaNs of every payload, signalling ones among them."""
    payload = np.arange(1, np.prod(shape) + 1, dtype=np.uint32) % 127 + 1
    return (payload.astype(np.uint16) | 0x7F80).reshape(shape).view(BF16)


def int32(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)
