"""The reference: a float64 oracle, planning written independently, and adapters to CUDA kernels.

Names are imported when first used: planning needs no torch, and importing torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ref.prefill import OracleResult as OracleResult
    from torch_ref.prefill import SparsePrefillResult as SparsePrefillResult
    from torch_ref.prefill import sparse_prefill as sparse_prefill
    from torch_ref.prefill import sparse_prefill_oracle as sparse_prefill_oracle
    from torch_ref.variants import Variant as Variant

_HOME = {
    "OracleResult": "torch_ref.prefill",
    "SparsePrefillResult": "torch_ref.prefill",
    "Variant": "torch_ref.variants",
    "sparse_prefill": "torch_ref.prefill",
    "sparse_prefill_oracle": "torch_ref.prefill",
}

__all__ = [
    "OracleResult",
    "SparsePrefillResult",
    "Variant",
    "sparse_prefill",
    "sparse_prefill_oracle",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
