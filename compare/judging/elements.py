"""Two blocks of elements beside one another, in float64 and in units of the last place."""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import BFloat16, Bool, Float64, Integer, Num
from torch import Tensor

_SPECIAL = {"nan": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}


def round_to_bfloat16(block: Float64[Tensor, "..."]) -> BFloat16[Tensor, "..."]:
    """float64 to bfloat16 with one rounding to nearest, ties to even; NaN stays NaN.

    A detour over a rounded float32 would round twice: 1 + 2^-8 + 2^-30 would become a tie. The
    float32 is therefore made by rounding to odd, which keeps which side of a tie the value is on.
    """
    single = block.float()
    widened = single.double()
    inexact = (widened != block) & ~torch.isnan(block)
    bits = single.view(torch.int32)
    bits -= (inexact & (widened.abs() > block.abs())).int()
    bits |= inexact.int()
    return single.bfloat16()


def _ordered(values: Num[Tensor, "..."]) -> Integer[Tensor, "..."]:
    """Integers in the order of the floats, one apart for neighbours; both zeros are 0."""
    if values.dtype == torch.bfloat16:
        bits, sign = values.view(torch.int16).int(), -(1 << 15)
    elif values.dtype == torch.float32:
        bits, sign = values.view(torch.int32).long(), -(1 << 31)
    else:
        raise TypeError(f"values: dtype {values.dtype}; accepted are bfloat16 and float32")
    # Of a negative float the bits read as an integer are sign + magnitude.
    return torch.where(bits < 0, sign - bits, bits)


def ulp_distance(got: Num[Tensor, "..."], expected: Num[Tensor, "..."]) -> Integer[Tensor, "..."]:
    """How many representable values lie from one to the other; both bfloat16 or both float32.

    Exact for finite values; an infinity counts as the value after the largest finite one.
    """
    return (_ordered(got) - _ordered(expected)).abs_()


class Pair:
    """A block and what it is compared with, [m, ...] each, widened once for all who measure it.

    Elements count where both are finite and the row isn't skipped; elsewhere got and expected are
    both 0 here. ULP distances are those of the first block's dtype, bfloat16 or float32.
    """

    def __init__(
        self,
        got: Num[Tensor, "m ..."],
        expected: Num[Tensor, "m ..."],
        skip: Bool[Tensor, " m"] | None = None,
    ) -> None:
        """skip: rows that are not to be compared at all."""
        self._stored = got, expected
        self.got, self.expected = got.double(), expected.double()
        self.error: Float64[Tensor, "m ..."] = (self.got - self.expected).abs_()
        self.max_abs = float(self.error.max()) if self.error.numel() else 0.0
        self.counted: Bool[Tensor, "m ..."] | None = None
        """None where every element counts."""
        self.special: dict[str, int] = {}
        """How many NaN, +inf and -inf stand where the other block has none."""
        self.one_sided: Bool[Tensor, " m"] | None = None
        """Rows that have such a special value; None where no row can."""
        self.count = self.error.numel()
        # A difference is finite where both sides are: none of these dtypes overflows in float64.
        if self.max_abs < float("inf") and (skip is None or not bool(skip.any())):
            return
        self._leave_out(skip)

    def _leave_out(self, skip: Bool[Tensor, " m"] | None) -> None:
        a, r = self.got, self.expected
        counted = torch.isfinite(a) & torch.isfinite(r)
        one_sided = torch.zeros_like(counted)
        rows = [-1] + [1] * (a.ndim - 1)
        kept = None if skip is None else ~skip.reshape(rows)
        for name, test in _SPECIAL.items():
            differ = test(a) != test(r)
            if kept is not None:
                differ &= kept
            self.special[name] = int(torch.count_nonzero(differ))
            one_sided |= differ
        if kept is not None:
            counted &= kept
        self.counted = counted
        self.one_sided = one_sided.reshape(len(a), -1).any(dim=1)
        self.got = torch.where(counted, a, 0.0)
        self.expected = torch.where(counted, r, 0.0)
        self.error = (self.got - self.expected).abs_()
        self.max_abs = float(self.error.max())
        self.count = int(torch.count_nonzero(counted))

    @cached_property
    def row_error(self) -> Float64[Tensor, " m"]:
        """Euclidean norm of the differences of each row."""
        return row_norm(self.error)

    @property
    def stored(self) -> Num[Tensor, "m ..."]:
        """The first block as it was given."""
        return self._stored[0]

    def ulp(self) -> Integer[Tensor, "m ..."]:
        """Distance of each element in ULP; it means nothing where the element doesn't count."""
        got, expected = self._stored
        return ulp_distance(got, _as(expected, got.dtype))

    def counting(self, values: Tensor) -> Tensor:
        """The values of those elements that count, flat."""
        return values.flatten() if self.counted is None else values[self.counted]


def row_norm(block: Float64[Tensor, "m ..."]) -> Float64[Tensor, " m"]:
    """Euclidean norm over all axes but the first."""
    if block.ndim == 1:
        return block.abs()
    return torch.linalg.vector_norm(block.flatten(1), dim=1)


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype == torch.float64 and dtype == torch.bfloat16:
        return round_to_bfloat16(values)
    return values.to(dtype)
