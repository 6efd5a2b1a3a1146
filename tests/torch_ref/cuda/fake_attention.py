"""Attention of a fake kernel over pages, with the causal triangle that the real ones have."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(q: Tensor, keys: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out [s, H, 512] and natural lse [s, H], -inf without a key; q [s, H, 576], keys [n, 576]."""
    s, H, _ = q.shape
    out = torch.zeros(s, H, 512)
    lse = torch.full((s, H), -math.inf)
    for j in range(s):
        seen = max(len(keys) - (s - 1 - j), 0) if causal else len(keys)
        if seen:
            z = q[j].float() @ keys[:seen].float().T * scale
            lse[j] = torch.logsumexp(z, -1)
            out[j] = torch.softmax(z, -1) @ keys[:seen, :512].float()
    return out, lse
