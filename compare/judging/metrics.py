"""Distances between two tensors, collected block by block.

Arithmetic is float64; a block is at most a few million elements, so that tensors of many gigabytes
(memory-mapped or not) never exist in float64 as a whole.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
from jaxtyping import Float64, Int64, Integer, Shaped

from compare.judging.verdict import TensorMetrics

REL_FLOOR = 1e-6
"""Added to |expected| in a relative error, as FlashMLA's tests do."""

COSINE_FLOOR = 1e-12
"""Below this sum of squares of the expected values the cosine difference is taken as 0."""

# Quantiles come from a histogram over the leading bits of a float32: relative resolution 2^-9, and
# exact for whole numbers up to 1023, so for every ULP distance that matters.
_DROPPED_BITS = 14
_BINS = 1 << (31 - _DROPPED_BITS)
_QUANTILES = (0.5, 0.99)

_SPECIAL = {"nan": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """FlashMLA's rule for one tensor: each element within `absolute` OR within `relative`, and the
    tensor's cosine difference at most `cosine`. absolute is in the tensor's unit.
    """

    absolute: float
    relative: float
    cosine: float


def to_float64(block: Shaped[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    """A block in float64, exactly. bfloat16 goes through its bits: several times faster."""
    if block.dtype == ml_dtypes.bfloat16:
        bits = np.ascontiguousarray(block).view(np.uint16).astype(np.uint32) << np.uint32(16)
        block = bits.view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return block.astype(np.float64)


def round_to_bfloat16(block: Float64[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """float64 to bfloat16 with one rounding to nearest, ties to even; NaN stays NaN.

    A detour over a rounded float32 would round twice: 1 + 2^-8 + 2^-30 would become a tie. The
    float32 is therefore made by rounding to odd, which keeps which side of a tie the value is on.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        single = block.astype(np.float32)
        widened = single.astype(np.float64)
    inexact = (widened != block) & ~np.isnan(block)
    bits = single.view(np.uint32).copy()
    bits -= (inexact & (np.abs(widened) > np.abs(block))).astype(np.uint32)
    bits |= inexact.astype(np.uint32)
    return bits.view(np.float32).astype(ml_dtypes.bfloat16)


def _ordered(values: Shaped[np.ndarray, "..."]) -> Integer[np.ndarray, "..."]:
    """Integers in the order of the floats, one apart for neighbours; both zeros are 0."""
    if values.dtype == ml_dtypes.bfloat16:
        bits, sign = np.ascontiguousarray(values).view(np.int16).astype(np.int32), -(1 << 15)
    elif values.dtype == np.float32:
        bits, sign = np.ascontiguousarray(values).view(np.int32).astype(np.int64), -(1 << 31)
    else:
        raise TypeError(f"values: dtype {values.dtype}; accepted are bfloat16 and float32")
    # Of a negative float the bits read as an integer are sign + magnitude.
    return np.where(bits < 0, sign - bits, bits)


def ulp_distance(
    got: Shaped[np.ndarray, "..."], expected: Shaped[np.ndarray, "..."]
) -> Integer[np.ndarray, "..."]:
    """How many representable values lie from one to the other; both bfloat16 or both float32.

    Exact for finite values; an infinity counts as the value after the largest finite one.
    """
    return np.abs(_ordered(got) - _ordered(expected))


class Distance:
    """Distances of one tensor to another, fed in blocks; `metrics()` when all have been added."""

    def __init__(self, tensor: str, tolerance: Tolerance) -> None:
        """tensor: "out" is measured in bfloat16 ULP, any other name in float32 ULP."""
        self.tensor = tensor
        self.tolerance = tolerance
        self.elements = 0
        self.matching = 0
        self.worst_use = -1.0
        """Largest min(abs / absolute, rel / relative) of an element; at least 1 fails the rule."""
        self.worst_at: tuple[int, ...] | None = None
        self.worst_values = (0.0, 0.0)
        self._special = dict.fromkeys(_SPECIAL, 0)
        self._max_abs = self._max_rel = 0.0
        self._max_ulp = 0
        self._square_error = self._square_got = self._square_expected = self._product = 0.0
        self._abs_bins = np.zeros(_BINS, np.int64)
        self._ulp_bins = np.zeros(_BINS, np.int64)

    def add(
        self,
        got: Shaped[np.ndarray, "m ..."],
        expected: Shaped[np.ndarray, "m ..."],
        places: Int64[np.ndarray, "m axes"],
        skip: np.ndarray | None = None,
    ) -> None:
        """One block. places[i] is the index in the tensor of row i of the block; further axes of
        the block follow it. skip [m]: rows that are not to be compared at all.
        """
        if skip is not None and skip.any():
            got, expected, places = got[~skip], expected[~skip], places[~skip]
        if got.size == 0:
            return
        a, r = to_float64(got), to_float64(expected)
        finite = np.isfinite(a) & np.isfinite(r)
        every = bool(finite.all())
        if not every:
            for name, test in _SPECIAL.items():
                self._special[name] += int(np.count_nonzero(test(a) != test(r)))
            a, r = np.where(finite, a, 0.0), np.where(finite, r, 0.0)
        count = int(np.count_nonzero(finite))
        if count == 0:
            return
        error = np.abs(a - r)
        relative = error / (np.abs(r) + REL_FLOOR)
        rule = self.tolerance
        with np.errstate(over="ignore"):
            use = np.minimum(error / rule.absolute, relative / rule.relative)
        self.elements += count
        self.matching += count - int(np.count_nonzero(use >= 1.0))
        self._max_abs = max(self._max_abs, float(error.max()))
        self._max_rel = max(self._max_rel, float(relative.max()))
        self._square_error += float(np.vdot(error, error))
        self._square_got += float(np.vdot(a, a))
        self._square_expected += float(np.vdot(r, r))
        self._product += float(np.vdot(a, r))
        worst = int(use.argmax())
        if use.flat[worst] > self.worst_use:
            self.worst_use = float(use.flat[worst])
            row, *rest = np.unravel_index(worst, use.shape)
            self.worst_at = (*map(int, places[row]), *map(int, rest))
            self.worst_values = (float(a.flat[worst]), float(r.flat[worst]))
        distance = ulp_distance(self._stored(got), self._stored(expected))
        if not every:
            error, distance = error[finite], distance[finite]
        self._max_ulp = max(self._max_ulp, int(distance.max()))
        _count_into(self._abs_bins, error)
        _count_into(self._ulp_bins, distance)

    def merge(self, later: Distance) -> None:
        """Takes in what another one has found in blocks that come after its own."""
        self.elements += later.elements
        self.matching += later.matching
        if later.worst_use > self.worst_use:
            self.worst_use = later.worst_use
            self.worst_at, self.worst_values = later.worst_at, later.worst_values
        for name, count in later._special.items():
            self._special[name] += count
        self._max_abs = max(self._max_abs, later._max_abs)
        self._max_rel = max(self._max_rel, later._max_rel)
        self._max_ulp = max(self._max_ulp, later._max_ulp)
        self._square_error += later._square_error
        self._square_got += later._square_got
        self._square_expected += later._square_expected
        self._product += later._product
        if later.elements:
            self._abs_bins += later._abs_bins
            self._ulp_bins += later._ulp_bins

    def _stored(self, values: np.ndarray) -> np.ndarray:
        """Values as the tensor's dtype has them: bfloat16 for out, else float32."""
        if self.tensor == "out":
            return round_to_bfloat16(values) if values.dtype == np.float64 else values
        with np.errstate(over="ignore"):
            return values.astype(np.float32, copy=False)

    @property
    def cosine_difference(self) -> float:
        """1 - 2 <a, r> / (<a, a> + <r, r>); 0 where <r, r> is below 1e-12."""
        if self._square_expected < COSINE_FLOOR:
            return 0.0
        return 1.0 - 2.0 * self._product / (self._square_got + self._square_expected)

    @property
    def rel_l2(self) -> float:
        """||a - r|| / ||r||; inf where only r is zero."""
        if self._square_error == 0.0:
            return 0.0
        if self._square_expected == 0.0:
            return math.inf
        return math.sqrt(self._square_error / self._square_expected)

    def metrics(self) -> TensorMetrics:
        """What was found in all blocks together."""
        return TensorMetrics(
            elements=self.elements,
            max_abs=self._max_abs,
            max_rel=self._max_rel,
            rel_l2=self.rel_l2,
            cosine_difference=self.cosine_difference,
            quantiles_abs=(*_quantiles(self._abs_bins), self._max_abs),
            ulp=(*_quantiles(self._ulp_bins), float(self._max_ulp)),
            matched=self.matching / self.elements if self.elements else 1.0,
            special={name: count for name, count in self._special.items() if count},
        )


def _count_into(bins: np.ndarray, values: np.ndarray) -> None:
    with np.errstate(over="ignore", under="ignore"):
        bits = np.ravel(values).astype(np.float32).view(np.uint32)
    places = bits >> _DROPPED_BITS
    if len(places) < _BINS // 4:
        np.add.at(bins, places, 1)
    else:
        bins += np.bincount(places, minlength=_BINS)


def _quantiles(bins: np.ndarray) -> tuple[float, float]:
    """The lower edge of the bin that holds each quantile; 0 where nothing was counted."""
    total = np.cumsum(bins)
    if total[-1] == 0:
        return 0.0, 0.0
    at = [int(np.searchsorted(total, math.ceil(q * int(total[-1])))) for q in _QUANTILES]
    edges = (np.array(at, np.uint32) << np.uint32(_DROPPED_BITS)).view(np.float32)
    return float(edges[0]), float(edges[1])
