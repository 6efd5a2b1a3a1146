"""The reference: a float64 oracle, planning written independently, and adapters to CUDA kernels.

Names are imported when first used: planning needs no torch, and importing torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ref.decode import DecodeOracleResult as DecodeOracleResult
    from torch_ref.decode import DecodeResult as DecodeResult
    from torch_ref.decode import DecodeVariant as DecodeVariant
    from torch_ref.decode import dcp_decode as dcp_decode
    from torch_ref.decode import dcp_decode_oracle as dcp_decode_oracle
    from torch_ref.merge import merge_oracle as merge_oracle
    from torch_ref.merge import merge_states as merge_states
    from torch_ref.merge import natural_lse as natural_lse
    from torch_ref.prefill import OracleResult as OracleResult
    from torch_ref.prefill import SparsePrefillResult as SparsePrefillResult
    from torch_ref.prefill import Variant as Variant
    from torch_ref.prefill import sparse_prefill as sparse_prefill
    from torch_ref.prefill import sparse_prefill_oracle as sparse_prefill_oracle
    from torch_ref.v4 import ChunkStage as ChunkStage
    from torch_ref.v4 import FlatCall as FlatCall
    from torch_ref.v4 import V4PrefillResult as V4PrefillResult
    from torch_ref.v4 import flat_v4_call as flat_v4_call
    from torch_ref.v4 import v4_prefill as v4_prefill

_HOME = {
    "ChunkStage": "torch_ref.v4",
    "DecodeOracleResult": "torch_ref.decode",
    "DecodeResult": "torch_ref.decode",
    "DecodeVariant": "torch_ref.decode",
    "FlatCall": "torch_ref.v4",
    "OracleResult": "torch_ref.prefill",
    "SparsePrefillResult": "torch_ref.prefill",
    "V4PrefillResult": "torch_ref.v4",
    "Variant": "torch_ref.prefill",
    "dcp_decode": "torch_ref.decode",
    "dcp_decode_oracle": "torch_ref.decode",
    "flat_v4_call": "torch_ref.v4",
    "merge_oracle": "torch_ref.merge",
    "merge_states": "torch_ref.merge",
    "natural_lse": "torch_ref.merge",
    "sparse_prefill": "torch_ref.prefill",
    "sparse_prefill_oracle": "torch_ref.prefill",
    "v4_prefill": "torch_ref.v4",
}

__all__ = [
    "ChunkStage",
    "DecodeOracleResult",
    "DecodeResult",
    "DecodeVariant",
    "FlatCall",
    "OracleResult",
    "SparsePrefillResult",
    "V4PrefillResult",
    "Variant",
    "dcp_decode",
    "dcp_decode_oracle",
    "flat_v4_call",
    "merge_oracle",
    "merge_states",
    "natural_lse",
    "sparse_prefill",
    "sparse_prefill_oracle",
    "v4_prefill",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
