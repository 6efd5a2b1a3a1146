"""The prefill path of a DeepSeek-V4 layer: plan, gather, lists of keys, attention."""

from jax_impl.prefill.v4.api import v4_prefill
from jax_impl.prefill.v4.result import ChunkStage, V4PrefillResult

__all__ = ["ChunkStage", "V4PrefillResult", "v4_prefill"]
