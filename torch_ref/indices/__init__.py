"""Which keys a token of DeepSeek-V4 sees, as the serving engine's index builders list them.

Sources: vLLM's sparse_swa.py, deepseek_v4/common/ops/cache_utils.py, sparse_mla.py and
compressor_utils.py. What the engine leaves undefined there is refused by name here.
"""

from __future__ import annotations

from torch_ref.indices.batch import TokenBatch, token_batch, token_to_request
from torch_ref.indices.compressed import c128_global_slots, c128_topk_indices, global_topk_slots
from torch_ref.indices.paged import dspark_indices, paged_swa_indices
from torch_ref.indices.visibility import image_visibility, visible_entries, window_positions
from torch_ref.indices.workspace import combine_topk_swa_indices

__all__ = [
    "TokenBatch",
    "c128_global_slots",
    "c128_topk_indices",
    "combine_topk_swa_indices",
    "dspark_indices",
    "global_topk_slots",
    "image_visibility",
    "paged_swa_indices",
    "token_batch",
    "token_to_request",
    "visible_entries",
    "window_positions",
]
