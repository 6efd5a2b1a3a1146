"""The candidate: sparse prefill, DCP decode and their planning rules, in JAX and Pallas.

Names are resolved on first use, so that the planning rules, which are plain NumPy, can be
imported by a scheduler that never starts JAX.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_impl import kv_cache, planning, prefill
    from jax_impl.decode import (
        DecodeCapacity,
        DecodePlan,
        DecodeResult,
        dcp_decode,
        lse_from_base2,
        merge_states,
        plan_decode,
    )
    from jax_impl.prefill import (
        SparsePrefillResult,
        sparse_prefill,
        sparse_prefill_paged,
        unsupported_reason,
    )
    from jax_impl.prefill.v4 import ChunkStage, V4PrefillResult, v4_prefill

_HOMES = {
    "ChunkStage": "jax_impl.prefill.v4",
    "DecodeCapacity": "jax_impl.decode",
    "DecodePlan": "jax_impl.decode",
    "DecodeResult": "jax_impl.decode",
    "SparsePrefillResult": "jax_impl.prefill",
    "V4PrefillResult": "jax_impl.prefill.v4",
    "dcp_decode": "jax_impl.decode",
    "lse_from_base2": "jax_impl.decode",
    "merge_states": "jax_impl.decode",
    "plan_decode": "jax_impl.decode",
    "sparse_prefill": "jax_impl.prefill",
    "sparse_prefill_paged": "jax_impl.prefill",
    "unsupported_reason": "jax_impl.prefill",
    "v4_prefill": "jax_impl.prefill.v4",
}

_PACKAGES = ("kv_cache", "planning", "prefill")

# Under Pallas' interpreter a role that waits may hold a thread of XLA's CPU pool, which has one
# for each core: with fewer threads than roles, those that are waited for never run. XLA reads
# this when JAX is first used.
_INTERPRETER_THREADS = 8
if (os.cpu_count() or 1) < _INTERPRETER_THREADS:
    os.environ.setdefault("NPROC", str(_INTERPRETER_THREADS))

__all__ = [
    "ChunkStage",
    "DecodeCapacity",
    "DecodePlan",
    "DecodeResult",
    "SparsePrefillResult",
    "V4PrefillResult",
    "dcp_decode",
    "kv_cache",
    "lse_from_base2",
    "merge_states",
    "plan_decode",
    "planning",
    "prefill",
    "sparse_prefill",
    "sparse_prefill_paged",
    "unsupported_reason",
    "v4_prefill",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"jax_impl.{name}")
    raise AttributeError(f"module 'jax_impl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_PACKAGES])
