"""The whole V4 prefill path: as one plain sparse prefill, by chunks, and with known deviations."""

from __future__ import annotations

from torch_ref.v4.flat import FlatCall, flat_v4_call
from torch_ref.v4.pipeline import ChunkStage, V4PrefillResult, v4_prefill

__all__ = ["ChunkStage", "FlatCall", "V4PrefillResult", "flat_v4_call", "v4_prefill"]
