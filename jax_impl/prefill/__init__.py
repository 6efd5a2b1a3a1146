"""Sparse MLA prefill: every query token attends to its own list of KV rows."""

from jax_impl.backends import BACKENDS, unsupported_reason
from jax_impl.prefill.api import sparse_prefill
from jax_impl.prefill.paged import sparse_prefill_paged
from jax_impl.prefill.result import SparsePrefillResult

__all__ = [
    "BACKENDS",
    "SparsePrefillResult",
    "sparse_prefill",
    "sparse_prefill_paged",
    "unsupported_reason",
]
