"""Paged KV caches of DeepSeek-V3.2 and V4: layouts as data, writing, reading and gathering.

Written from the formats alone; jax_impl has tables of its own.
"""

from __future__ import annotations

from torch_ref.kv_cache.cache import (
    PagedKV,
    divergent_scales,
    empty_cache,
    insert_kv,
    read_kv,
)
from torch_ref.kv_cache.codec import decode_e4m3, encode_e4m3, ue8m0_bytes, ue8m0_scales
from torch_ref.kv_cache.formats import FORMATS, KVFormat, Region, find_format
from torch_ref.kv_cache.gather import gather_kv
from torch_ref.kv_cache.paging import position_slots

__all__ = [
    "FORMATS",
    "KVFormat",
    "PagedKV",
    "Region",
    "decode_e4m3",
    "divergent_scales",
    "empty_cache",
    "encode_e4m3",
    "find_format",
    "gather_kv",
    "insert_kv",
    "position_slots",
    "read_kv",
    "ue8m0_bytes",
    "ue8m0_scales",
]
