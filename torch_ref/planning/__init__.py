"""Planning rules, from spec and engine alone: chunks of prefill, rows and shards of decode.

Plain integers, no tensors; nothing here imports torch.
"""

from __future__ import annotations

from torch_ref.planning.decode import (
    BoundsShapeMismatch,
    DecodeRows,
    NonUniformBlock,
    decode_rows,
    local_key_counts,
)
from torch_ref.planning.prefill import (
    PrefillChunk,
    Rules,
    compressed_lens,
    gather_lens,
    gathers_compressed,
    plan_prefill_chunks,
    workspace_area_limit,
)
from torch_ref.planning.sharding import (
    check_shard,
    global_position,
    local_position,
    local_seq_lens,
    owner_rank,
)

__all__ = [
    "BoundsShapeMismatch",
    "DecodeRows",
    "NonUniformBlock",
    "PrefillChunk",
    "Rules",
    "check_shard",
    "compressed_lens",
    "decode_rows",
    "gather_lens",
    "gathers_compressed",
    "global_position",
    "local_key_counts",
    "local_position",
    "local_seq_lens",
    "owner_rank",
    "plan_prefill_chunks",
    "workspace_area_limit",
]
