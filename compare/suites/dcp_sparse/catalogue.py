"""The cases of ``dcp-sparse``."""

from __future__ import annotations

# Requests with keys on all ranks, on two of them, on one; a token without any key.
_CASES = ("lens=300+7+2,q=3+2+3,h=8,topk=48,world=4,interleave=4",)


def lines(full: bool) -> list[str]:
    """The case lines of dcp-sparse, each with a seed of its own."""
    return [f"dcp-sparse:{words},seed={seed}" for seed, words in enumerate(_CASES, 1)]
