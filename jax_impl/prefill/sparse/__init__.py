"""Attention over lists of keys: rows of a matrix, or slots of paged caches."""

from jax_impl.prefill.sparse.api import sparse_prefill
from jax_impl.prefill.sparse.paged import sparse_prefill_paged
from jax_impl.prefill.sparse.result import SparsePrefillResult

__all__ = ["SparsePrefillResult", "sparse_prefill", "sparse_prefill_paged"]
