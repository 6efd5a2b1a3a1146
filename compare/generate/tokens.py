"""Tokens of DeepSeek-V4's caches, as they are stored: 448 numbers of float8_e4m3fn in 7 groups with
a power of two each, and 64 of bfloat16.

A cache in bfloat16 holds the same numbers multiplied out, which is exact.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from compare.generate.streams import bell, below, scaled

NOPE, ROPE, GROUP = 448, 64, 64
GROUPS = NOPE // GROUP
DATA_BYTES = NOPE + 2 * ROPE
TOKEN_WORDS = DATA_BYTES // 8
"""Words of 8 bytes that a token's codes and rope fill."""
SCALE_BYTES = 8  # 7 scales and one of padding
PAGE_ALIGNMENT = 576
BIAS = 127
LEAST_SCALE, LARGEST_SCALE = 90, 140
ORDINARY_SCALE, ORDINARY_SCALES = 119, 3
_RARE = 8  # one group of so many has a scale below the ordinary ones


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """codes [N, 448] float8_e4m3fn, scales [N, 7] uint8 (2^(byte - 127)), rope [N, 64] bfloat16."""

    codes: np.ndarray
    scales: np.ndarray
    rope: np.ndarray

    def values(self) -> np.ndarray:
        """[N, 512] bfloat16."""
        power = np.repeat(self.scales.astype(np.int32) - BIAS, GROUP, axis=1)
        nope = np.ldexp(self.codes.astype(np.float32), power)
        whole = np.concatenate([nope, self.rope.astype(np.float32)], axis=1)
        return whole.astype(ml_dtypes.bfloat16)


def drawn_tokens(words: np.ndarray, scale_words: np.ndarray) -> Tokens:
    """Tokens of raw words [N, 512] and [N, 7]: a bell of numbers whose groups differ in scale, some
    by far. Codes are at most 256 of 448, so nothing is clamped; the largest scale makes 1.2 of
    their standard deviation, 74.
    """
    numbers = bell(words)
    rare = below(scale_words, ORDINARY_SCALE - LEAST_SCALE) + LEAST_SCALE
    ordinary = below(scale_words, ORDINARY_SCALES) + ORDINARY_SCALE
    choice = (scale_words & np.uint64(_RARE - 1)) == 0
    return Tokens(
        codes=scaled(numbers[:, :NOPE], -9).astype(ml_dtypes.float8_e4m3fn),
        scales=np.where(choice, rare, ordinary).astype(np.uint8),
        rope=scaled(numbers[:, NOPE:], -15).astype(ml_dtypes.bfloat16),
    )


def whole_tokens(nope: np.ndarray, rope: np.ndarray, scale_words: np.ndarray) -> Tokens:
    """Tokens of whole numbers of magnitude at most 8, each group's stored under one of the scales
    1/4, 1/2, 1, 2 and 4: every one of them is exact.
    """
    power = below(scale_words, 5) - 2
    codes = np.ldexp(nope.astype(np.float32), -np.repeat(power, GROUP, axis=1))
    return Tokens(
        codes=codes.astype(ml_dtypes.float8_e4m3fn),
        scales=(power + BIAS).astype(np.uint8),
        rope=rope.astype(np.float32).astype(ml_dtypes.bfloat16),
    )


def any_tokens(words: np.ndarray, scale_words: np.ndarray) -> Tokens:
    """Tokens of raw words [N, 72] and [N, 7]: any finite code, any scale of 2^-37 to 2^13 and any
    finite number of bfloat16, each as likely as another.
    """
    raw = np.ascontiguousarray(words).view(np.uint8)
    codes = raw[:, :NOPE]
    codes = np.where((codes & 0x7F) == 0x7F, codes & 0xFE, codes)
    steps = np.ascontiguousarray(scale_words >> np.uint64(48)).astype(np.int32)
    span = LARGEST_SCALE - LEAST_SCALE + 1
    rope = np.ascontiguousarray(raw[:, NOPE:]).view(np.uint16)
    rope = np.where((rope & 0x7F80) == 0x7F80, rope & 0xFF7F, rope).astype(np.uint16)
    return Tokens(
        codes=codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn),
        scales=(LEAST_SCALE + (steps * span >> 16)).astype(np.uint8),
        rope=rope.view(ml_dtypes.bfloat16),
    )


def page_stride(page: int) -> int:
    """Bytes from one page of v4-fp8 to the next."""
    size = page * (DATA_BYTES + SCALE_BYTES)
    return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


class PagedCache:
    """A cache to be filled. poison: what nothing is written to is NaN and padding bytes are 0xA5;
    else all of it is 0.
    """

    def __init__(self, kv_format: str, pages: int, page: int, *, poison: bool) -> None:
        self.page = page
        self._fp8 = kv_format == "v4-fp8"
        if not self._fp8:
            fill = np.nan if poison else 0.0
            self.array = np.full((pages, page, NOPE + ROPE), fill, ml_dtypes.bfloat16)
            return
        # As a code, as a scale and twice as bfloat16, 0xFF is NaN.
        self.array = np.full((pages, page_stride(page)), 0xFF if poison else 0, np.uint8)
        first, last = page * DATA_BYTES, page * (DATA_BYTES + SCALE_BYTES)
        self._data = self.array[:, :first].reshape(pages, page, DATA_BYTES)
        self._scales = self.array[:, first:last].reshape(pages, page, SCALE_BYTES)
        if poison:
            self._scales[..., GROUPS:] = 0xA5
            self.array[:, last:] = 0xA5

    def write(self, pages: np.ndarray, offsets: np.ndarray, tokens: Tokens) -> None:
        """Puts token n on page pages[n] at offsets[n]. Padding stays as it was."""
        if not self._fp8:
            self.array[pages, offsets] = tokens.values()
            return
        data = np.empty((len(pages), DATA_BYTES), np.uint8)
        data[:, :NOPE] = tokens.codes.view(np.uint8)
        data[:, NOPE:] = np.ascontiguousarray(tokens.rope).view(np.uint8)
        self._data[pages, offsets] = data
        self._scales[pages, offsets, :GROUPS] = tokens.scales
