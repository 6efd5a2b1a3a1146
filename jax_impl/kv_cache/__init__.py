"""Paged KV caches: their layouts, single tokens, and the gather into a bfloat16 workspace."""

from jax_impl.kv_cache.formats import FORMATS, KVFormat
from jax_impl.kv_cache.gather import gather_kv, gather_kv_into
from jax_impl.kv_cache.paged import PagedKV, empty_cache
from jax_impl.kv_cache.tokens import insert_kv, read_kv, read_scales

__all__ = [
    "FORMATS",
    "KVFormat",
    "PagedKV",
    "empty_cache",
    "gather_kv",
    "gather_kv_into",
    "insert_kv",
    "read_kv",
    "read_scales",
]
