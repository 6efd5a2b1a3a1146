"""Distances between two tensors, collected block by block.

Arithmetic is float64; a block is at most a few million elements, so that tensors of many gigabytes
(memory-mapped or not) never exist in float64 as a whole.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import torch
from jaxtyping import Float64, Int64, Shaped

from compare.judging.elements import Pair
from compare.judging.histogram import Histogram
from compare.protocol.verdict import TensorMetrics

REL_FLOOR = 1e-6
"""Added to |expected| in a relative error, as FlashMLA's tests do."""

COSINE_FLOOR = 1e-12
"""Below this sum of squares of the expected values the cosine difference is taken as 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """FlashMLA's rule for one tensor: each element within `absolute` OR within `relative`, and the
    tensor's cosine difference at most `cosine`. absolute is in the tensor's unit.
    """

    absolute: float
    relative: float
    cosine: float

    def use(
        self,
        error: Float64[torch.Tensor, "..."],
        relative: Float64[torch.Tensor, "..."],
        expected: Float64[torch.Tensor, "..."],
    ) -> Float64[torch.Tensor, "..."]:
        """How much of the rule each element uses; at least 1 fails it."""
        return torch.minimum(error / self.absolute, relative / self.relative)

    def __str__(self) -> str:
        return f"abs {self.absolute:g} or rel {self.relative:.3g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumTolerance(Tolerance):
    """FlashInfer's rule: each element within absolute + relative |expected|."""

    cosine: float = math.inf

    def use(
        self,
        error: Float64[torch.Tensor, "..."],
        relative: Float64[torch.Tensor, "..."],
        expected: Float64[torch.Tensor, "..."],
    ) -> Float64[torch.Tensor, "..."]:
        return error / (self.absolute + self.relative * expected.abs())

    def __str__(self) -> str:
        return f"abs {self.absolute:g} and rel {self.relative:g} together"


def to_float64(block: Shaped[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    """A block in float64, exactly. bfloat16 goes through its bits: several times faster."""
    if block.dtype == ml_dtypes.bfloat16:
        bits = np.ascontiguousarray(block).view(np.uint16).astype(np.uint32) << np.uint32(16)
        block = bits.view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return block.astype(np.float64)


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
        self._special = dict.fromkeys(("nan", "+inf", "-inf"), 0)
        self._max_abs = self._max_rel = 0.0
        self._max_ulp = 0
        self._square_error = self._square_got = self._square_expected = self._product = 0.0
        self._abs = Histogram()
        self._ulp = Histogram()

    def add(self, pair: Pair, places: Int64[np.ndarray, "m axes"]) -> None:
        """One block. places[i] is the index in the tensor of row i of the block; further axes of
        the block follow it.
        """
        for name, found in pair.special.items():
            self._special[name] += found
        if pair.count == 0:
            return
        a, r, error, rule = pair.got, pair.expected, pair.error, self.tolerance
        relative = r.abs().add_(REL_FLOOR)
        torch.div(error, relative, out=relative)
        use = rule.use(error, relative, r)
        distance = pair.counting(pair.ulp())
        flat_a, flat_r, flat_error = a.flatten(), r.flatten(), error.flatten()
        # One transfer from the device for all of them.
        found = torch.stack(
            [
                relative.max(),
                use.max(),
                torch.count_nonzero(use >= 1.0).double(),
                torch.dot(flat_error, flat_error),
                torch.dot(flat_a, flat_a),
                torch.dot(flat_r, flat_r),
                torch.dot(flat_a, flat_r),
                distance.max().double(),
            ]
        ).tolist()
        largest_relative, largest_use, outside, errors, gots, expecteds, products, ulp = found
        self.elements += pair.count
        self.matching += pair.count - int(outside)
        self._max_abs = max(self._max_abs, pair.max_abs)
        self._max_rel = max(self._max_rel, largest_relative)
        self._max_ulp = max(self._max_ulp, int(ulp))
        self._square_error += errors
        self._square_got += gots
        self._square_expected += expecteds
        self._product += products
        if largest_use > self.worst_use:
            self.worst_use = largest_use
            worst = int(use.argmax())
            row, *rest = np.unravel_index(worst, tuple(use.shape))
            self.worst_at = (*map(int, places[row]), *map(int, rest))
            self.worst_values = (float(flat_a[worst]), float(flat_r[worst]))
        self._abs.add(pair.counting(error))
        self._ulp.add(distance)

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
        self._abs.merge(later._abs)
        self._ulp.merge(later._ulp)

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
            quantiles_abs=(*self._abs.quantiles(0.5, 0.99), self._max_abs),
            ulp=(*self._ulp.quantiles(0.5, 0.99), float(self._max_ulp)),
            matched=self.matching / self.elements if self.elements else 1.0,
            special={name: count for name, count in self._special.items() if count},
        )
