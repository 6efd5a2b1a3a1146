"""The reference: a float64 oracle, planning written independently, and adapters to CUDA kernels.

Names are imported when first used: planning needs no torch, and importing torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ref.decode import DecodeOracleResult as DecodeOracleResult
    from torch_ref.decode import DecodeResult as DecodeResult
    from torch_ref.decode import dcp_decode as dcp_decode
    from torch_ref.decode import dcp_decode_oracle as dcp_decode_oracle
    from torch_ref.decode_variants import DecodeVariant as DecodeVariant
    from torch_ref.merge import merge_oracle as merge_oracle
    from torch_ref.merge import merge_states as merge_states
    from torch_ref.merge import natural_lse as natural_lse
    from torch_ref.prefill import OracleResult as OracleResult
    from torch_ref.prefill import SparsePrefillResult as SparsePrefillResult
    from torch_ref.prefill import sparse_prefill as sparse_prefill
    from torch_ref.prefill import sparse_prefill_oracle as sparse_prefill_oracle
    from torch_ref.variants import Variant as Variant

_HOME = {
    "DecodeOracleResult": "torch_ref.decode",
    "DecodeResult": "torch_ref.decode",
    "DecodeVariant": "torch_ref.decode_variants",
    "OracleResult": "torch_ref.prefill",
    "SparsePrefillResult": "torch_ref.prefill",
    "Variant": "torch_ref.variants",
    "dcp_decode": "torch_ref.decode",
    "dcp_decode_oracle": "torch_ref.decode",
    "merge_oracle": "torch_ref.merge",
    "merge_states": "torch_ref.merge",
    "natural_lse": "torch_ref.merge",
    "sparse_prefill": "torch_ref.prefill",
    "sparse_prefill_oracle": "torch_ref.prefill",
}

__all__ = [
    "DecodeOracleResult",
    "DecodeResult",
    "DecodeVariant",
    "OracleResult",
    "SparsePrefillResult",
    "Variant",
    "dcp_decode",
    "dcp_decode_oracle",
    "merge_oracle",
    "merge_states",
    "natural_lse",
    "sparse_prefill",
    "sparse_prefill_oracle",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
