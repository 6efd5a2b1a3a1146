"""Wrong: codes are not multiplied by their scales."""

from __future__ import annotations

import torch
from right_v4 import v4


def factors(scales):
    return torch.ones(len(scales), 448, dtype=torch.float64)


def v4_prefill(**given):
    return v4(given, factors=factors)
