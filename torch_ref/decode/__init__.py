"""DCP decode of one rank: the float64 oracle, a kernel's recipe eagerly, known deviations."""

from __future__ import annotations

from torch_ref.decode.oracle import (
    DecodeOracleResult,
    DecodeResult,
    dcp_decode,
    dcp_decode_oracle,
)
from torch_ref.decode.variants import DecodeVariant

__all__ = [
    "DecodeOracleResult",
    "DecodeResult",
    "DecodeVariant",
    "dcp_decode",
    "dcp_decode_oracle",
]
