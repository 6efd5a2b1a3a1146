"""Arithmetic of prefill and decode alike: bases of logarithms, maxima, fp32 matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def max_without_nan(scores: Tensor) -> Tensor:
    """The maximum over the last axis with NaN left out, as CUDA's fmax does; -inf of nothing."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -math.inf)
    return scores.masked_fill(scores.isnan(), -math.inf).amax(-1)


@contextmanager
def full_fp32_products() -> Iterator[None]:
    """fp32 matrix products in fp32: TF32 would drop 13 bits of every key, here and on a CPU."""
    mkldnn = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    backends = (torch.backends.cuda.matmul, mkldnn)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
