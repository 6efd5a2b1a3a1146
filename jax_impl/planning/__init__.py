"""Host-side planning: which requests share a launch, and how many rows each launch needs.

Integers and integer arrays in; frozen dataclasses, or NumPy arrays of 64-bit integers, out.
Nothing here is traced by JAX.
"""

from jax_impl.planning.decode_rows import DecodeRows, decode_rows, is_ragged, local_key_counts
from jax_impl.planning.kv_sharding import (
    cache_slots,
    check_page_size,
    global_position,
    local_index,
    local_seq_lens,
    owner,
)
from jax_impl.planning.prefill_chunks import (
    PrefillChunk,
    compressed_lens,
    gather_lens,
    max_workspace_area,
    plan_prefill_chunks,
)

__all__ = [
    "DecodeRows",
    "PrefillChunk",
    "cache_slots",
    "check_page_size",
    "compressed_lens",
    "decode_rows",
    "gather_lens",
    "global_position",
    "is_ragged",
    "local_index",
    "local_key_counts",
    "local_seq_lens",
    "max_workspace_area",
    "owner",
    "plan_prefill_chunks",
]
