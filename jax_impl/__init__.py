"""The candidate: DeepSeek-V4 sparse prefill and its planning rules, in JAX and Pallas.

Names are resolved on first use, so that the planning rules, which are plain NumPy, can be
imported by a scheduler that never starts JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_impl import planning
    from jax_impl.prefill import SparsePrefillResult, sparse_prefill, unsupported_reason

_HOMES = {
    "SparsePrefillResult": "jax_impl.prefill",
    "sparse_prefill": "jax_impl.prefill",
    "unsupported_reason": "jax_impl.prefill",
}

_PACKAGES = ("planning",)

__all__ = ["SparsePrefillResult", "planning", "sparse_prefill", "unsupported_reason"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"jax_impl.{name}")
    raise AttributeError(f"module 'jax_impl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_PACKAGES])
