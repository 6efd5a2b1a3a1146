"""Sparse prefill: the float64 oracle, the eager run of the kernel's recipe, known deviations."""

from __future__ import annotations

from torch_ref.prefill.oracle import (
    OracleResult,
    SparsePrefillResult,
    sparse_prefill,
    sparse_prefill_oracle,
)
from torch_ref.prefill.variants import Variant

__all__ = [
    "OracleResult",
    "SparsePrefillResult",
    "Variant",
    "sparse_prefill",
    "sparse_prefill_oracle",
]
