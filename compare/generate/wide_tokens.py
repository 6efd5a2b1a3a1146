"""Tokens of caches whose rows are 576 wide, as they are stored: DeepSeek-V3.2's 512 numbers of
float8_e4m3fn in 4 groups with a float32 each, and 64 of bfloat16.

A cache in bfloat16 holds the same numbers multiplied out, rounded to bfloat16.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from compare.generate.tokens import LARGEST_SCALE, LEAST_SCALE, ROPE

FORMATS = ("v3.2-fp8", "bf16-576")
WIDTH = 576
GROUPS = 4
TOKEN_WORDS = (512 + 2 * ROPE) // 8
"""Words of 8 bytes that a token's codes and rope fill."""
_NOPE = WIDTH - ROPE
_SCALES_END = _NOPE + 4 * GROUPS
TOKEN_BYTES = _SCALES_END + 2 * ROPE


@dataclasses.dataclass(frozen=True, eq=False)
class WideTokens:
    """codes [N, 512] float8_e4m3fn, scales [N, 4] float32, rope [N, 64] bfloat16."""

    codes: np.ndarray
    scales: np.ndarray
    rope: np.ndarray

    def values(self) -> np.ndarray:
        """[N, 576] bfloat16."""
        nope = self.codes.astype(np.float32) * np.repeat(self.scales, _NOPE // GROUPS, axis=1)
        whole = np.concatenate([nope, self.rope.astype(np.float32)], axis=1)
        return whole.astype(ml_dtypes.bfloat16)


def any_wide_tokens(words: np.ndarray, scale_words: np.ndarray) -> WideTokens:
    """Tokens of raw words [N, 80] and [N, 4]: any finite code, scales of 2^-37 to 2^13, of which
    every other one is a power of two, and any finite number of bfloat16.
    """
    raw = np.ascontiguousarray(words).view(np.uint8)
    codes = raw[:, :_NOPE]
    codes = np.where((codes & 0x7F) == 0x7F, codes & 0xFE, codes)
    steps = (scale_words >> np.uint64(48)).astype(np.uint32)
    exponent = LEAST_SCALE + (steps * np.uint32(LARGEST_SCALE - LEAST_SCALE) >> 16)
    mantissa = (scale_words & np.uint64(0x7FFFFF)).astype(np.uint32)
    plain = (scale_words >> np.uint64(32)) & np.uint64(1) == 1
    bits = (exponent.astype(np.uint32) << 23) | np.where(plain, 0, mantissa).astype(np.uint32)
    rope = np.ascontiguousarray(raw[:, _NOPE:]).view(np.uint16)
    rope = np.where((rope & 0x7F80) == 0x7F80, rope & 0xFF7F, rope).astype(np.uint16)
    return WideTokens(
        codes=codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn),
        scales=bits.view(np.float32),
        rope=rope.view(ml_dtypes.bfloat16),
    )


class WidePagedCache:
    """As PagedCache: what nothing is written to is NaN where poison is set, else 0."""

    def __init__(self, kv_format: str, pages: int, page: int, *, poison: bool) -> None:
        self.page = page
        self._fp8 = kv_format == "v3.2-fp8"
        if self._fp8:
            # As a code, a scale and in bfloat16, 0xFF is NaN.
            self.array = np.full((pages, page * TOKEN_BYTES), 0xFF if poison else 0, np.uint8)
        else:
            fill = np.nan if poison else 0.0
            self.array = np.full((pages, page, WIDTH), fill, ml_dtypes.bfloat16)

    def write(self, pages: np.ndarray, offsets: np.ndarray, tokens: WideTokens) -> None:
        """Puts token n on page pages[n] at offsets[n]."""
        if not self._fp8:
            self.array[pages, offsets] = tokens.values()
            return
        parts = (tokens.codes, tokens.scales, tokens.rope)
        data = np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], axis=1)
        self.array.reshape(len(self.array), self.page, TOKEN_BYTES)[pages, offsets] = data
