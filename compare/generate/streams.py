"""Random numbers that are the same bytes on every machine: Philox counters and integer arithmetic.

Logarithms, cosines and library normals differ between machines and versions in the last bit; a
golden that names its inputs by hash needs none of them. Each tensor has a stream of its own, and
a stream can be entered at any row, so that big tensors are made in blocks.
"""

from __future__ import annotations

import enum

import numpy as np

GENERATOR_VERSION = "1"
"""Printed in reports and stored in every golden; raised when any stream's bytes change."""

_LOW_LANES = np.uint64(0x0000FFFF0000FFFF)
_BELL_CENTRE = 4 * 0xFFFF // 2


class Stream(enum.IntEnum):
    """One Philox key word per tensor or decision."""

    Q = 1
    KV = 2
    PICK = 3
    ORDER = 4
    HOLE = 5
    LENGTH = 6
    SINK = 7
    EMPTY = 8
    OFFSET = 9
    GROUP = 10
    DECODE_Q = 11
    DECODE_KV = 12
    PAGES = 13
    STALE = 14
    V4_Q = 15
    V4_WINDOW = 16
    V4_COMPRESSED = 17
    V4_WINDOW_SCALES = 18
    V4_COMPRESSED_SCALES = 19
    V4_PICK = 20
    V4_ORDER = 21
    V4_WINDOW_PAGES = 22
    V4_COMPRESSED_PAGES = 23
    V4_WINDOW_STALE = 24
    V4_COMPRESSED_STALE = 25
    V4_SET = 26
    V4_SINK = 27
    V4_WORKSPACE = 28
    V4_PADDING = 29
    V4_VALUES = 30
    V4_VALUE_KINDS = 31


def raw(seed: int, stream: Stream, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """uint64 words [start, start + prod(shape)) of a stream; start is a multiple of 4."""
    if start % 4:
        raise ValueError(f"start {start} isn't a multiple of 4, the words of one Philox counter")
    philox = np.random.Philox(key=np.array([seed, int(stream)], np.uint64))
    if start:
        philox.advance(start // 4)
    # The whole range of uint64: the raw words. random_raw would keep the interpreter's lock.
    everything = np.iinfo(np.uint64).max
    generator = np.random.Generator(philox)
    return generator.integers(0, everything, size=shape, dtype=np.uint64, endpoint=True)


def rows_of(seed: int, stream: Stream, start: int, end: int, width: int) -> np.ndarray:
    """uint64 [end - start, width]: rows of a stream whose rows are padded to a multiple of 4
    words.
    """
    padded = -(-width // 4) * 4
    return raw(seed, stream, start * padded, (end - start, padded))[:, :width]


def bell(words: np.ndarray) -> np.ndarray:
    """int64, a centred bell: the sum of the four 16-bit lanes of each word, standard deviation
    37837.
    """
    pairs = (words & _LOW_LANES) + ((words >> np.uint64(16)) & _LOW_LANES)
    total = (pairs + (pairs >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return total.astype(np.int64) - _BELL_CENTRE


def below(words: np.ndarray, bound: int | np.ndarray) -> np.ndarray:
    """int64 in [0, bound), bound < 2^32: the upper 32 bits of each word, scaled."""
    high = words >> np.uint64(32)
    return ((high * np.asarray(bound, np.uint64)) >> np.uint64(32)).astype(np.int64)


def scaled(integers: np.ndarray, exponent: int) -> np.ndarray:
    """integers * 2^exponent as float32, exact below 2^24."""
    return np.ldexp(integers.astype(np.float32), exponent)
