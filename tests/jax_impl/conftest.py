from __future__ import annotations

from tests.jax_impl.planted import plant

__all__ = ["plant"]
