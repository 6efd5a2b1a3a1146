"""Sparse MLA prefill: every query token attends to its own list of KV rows.

sparse/ attends, indices/ makes the lists, v4/ is the whole path of a V4 layer.
"""

from jax_impl.backends import BACKENDS, unsupported_reason
from jax_impl.prefill.sparse import (
    SparsePrefillResult,
    sparse_prefill,
    sparse_prefill_paged,
)

__all__ = [
    "BACKENDS",
    "SparsePrefillResult",
    "sparse_prefill",
    "sparse_prefill_paged",
    "unsupported_reason",
]
