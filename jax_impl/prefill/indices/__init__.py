"""Index builders of the V4 path: which keys each query token attends to, and where they lie.

All of them take int32 arrays of NumPy or JAX and can be jitted: widths and counts are static, the
rest may be traced. Outside jit they look at the values (validate=False leaves that out) and refuse,
in a ValueError that names the argument, what would make a token read another request's keys, keys
that aren't there, or fewer keys than it should. Inside jit no value can be looked at: there a list
never names anything but its own request's keys, and what can't be named is -1, which no attention
reads.
"""

from jax_impl.prefill.indices.combine import combine_topk_swa_indices, combine_topk_swa_slots
from jax_impl.prefill.indices.entries import (
    c128_global_slots,
    c128_topk_indices,
    c128_width,
    global_topk_slots,
)
from jax_impl.prefill.indices.layout import combined_width
from jax_impl.prefill.indices.tokens import (
    ImageVisibility,
    IndexLists,
    gather_lens,
    image_spans_csr,
    image_visibility,
    token_to_request,
)
from jax_impl.prefill.indices.window import dspark_indices, paged_swa_indices

__all__ = [
    "ImageVisibility",
    "IndexLists",
    "c128_global_slots",
    "c128_topk_indices",
    "c128_width",
    "combine_topk_swa_indices",
    "combine_topk_swa_slots",
    "combined_width",
    "dspark_indices",
    "gather_lens",
    "global_topk_slots",
    "image_spans_csr",
    "image_visibility",
    "paged_swa_indices",
    "token_to_request",
]
