"""The reference: a float64 oracle, planning written independently, and adapters to CUDA kernels."""

from torch_ref.prefill import (
    OracleResult,
    SparsePrefillResult,
    sparse_prefill,
    sparse_prefill_oracle,
)
from torch_ref.variants import Variant

__all__ = [
    "OracleResult",
    "SparsePrefillResult",
    "Variant",
    "sparse_prefill",
    "sparse_prefill_oracle",
]
