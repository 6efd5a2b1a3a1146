"""Counts of non-negative numbers by their leading bits, for quantiles of tensors of any size."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Num
from torch import Tensor

# Bins are the leading bits of a float32: relative resolution 2^-9, and exact for whole numbers up
# to 1023, so for every ULP distance that matters.
_DROPPED_BITS = 14
_BINS = 1 << (31 - _DROPPED_BITS)

_FEW = _BINS // 4
"""A block of fewer values than this waits until there are more: counting costs a walk over bins."""

_MOST_WAITING = 1 << 20

_COPIES = 16
"""Copies of the bins on a GPU. Half of all distances may be 0, and additions to one address of its
memory come one after the other."""


class Histogram:
    """Fed with blocks of values >= 0, without NaN; all blocks on one device."""

    def __init__(self) -> None:
        self._bins: Tensor | None = None
        self._waiting: list[Tensor] = []
        self._waiting_values = 0

    def add(self, values: Num[Tensor, " n"]) -> None:
        bins = values.float().view(torch.int32) >> _DROPPED_BITS
        if bins.numel() >= _FEW:
            self._count(bins)
            return
        self._wait([bins])

    def merge(self, other: Histogram) -> None:
        """Takes in what another one has counted."""
        if other._bins is not None:
            self._bins = other._bins if self._bins is None else self._bins + other._bins
        self._wait(other._waiting)

    def _wait(self, bins: list[Tensor]) -> None:
        self._waiting += bins
        self._waiting_values += sum(part.numel() for part in bins)
        if self._waiting_values > _MOST_WAITING:
            self._count_waiting()

    def _count_waiting(self) -> None:
        if self._waiting:
            self._count(torch.cat(self._waiting))
        self._waiting, self._waiting_values = [], 0

    def _count(self, bins: Tensor) -> None:
        if bins.is_cuda:
            copy = torch.arange(bins.numel(), device=bins.device, dtype=torch.int32) % _COPIES
            counted = torch.bincount(bins + copy * _BINS, minlength=_COPIES * _BINS)
            counted = counted.view(_COPIES, _BINS).sum(0)
        else:
            counted = torch.bincount(bins, minlength=_BINS)
        self._bins = counted if self._bins is None else self._bins + counted

    def quantiles(self, *wanted: float) -> tuple[float, ...]:
        """The lower edge of the bin that holds each quantile; 0 where nothing was counted."""
        self._count_waiting()
        if self._bins is None:
            return (0.0,) * len(wanted)
        total = np.cumsum(self._bins.cpu().numpy())
        at = [int(np.searchsorted(total, math.ceil(q * int(total[-1])))) for q in wanted]
        edges = (np.array(at, np.uint32) << np.uint32(_DROPPED_BITS)).view(np.float32)
        return tuple(edges.tolist())
