"""Host-side planning: which requests share a launch, and how many rows each launch needs.

Plain integers in, frozen dataclasses of plain integers out; nothing here is traced by JAX.
"""

from jax_impl.planning.prefill_chunks import (
    PrefillChunk,
    compressed_lens,
    gather_lens,
    max_workspace_area,
    plan_prefill_chunks,
)

__all__ = [
    "PrefillChunk",
    "compressed_lens",
    "gather_lens",
    "max_workspace_area",
    "plan_prefill_chunks",
]
