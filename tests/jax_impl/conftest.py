from __future__ import annotations

import importlib

import pytest

from tests.jax_impl.planted import plant

__all__ = ["compiled", "plant"]

ASKED_IN = (
    "jax_impl.arrays",
    "jax_impl.decode.api",
    "jax_impl.decode.xla",
    "jax_impl.kv_cache.gather",
    "jax_impl.prefill.sparse.xla",
    "jax_impl.prefill.v4.api",
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls outside jit run the programs that they run on a GPU, though this is a CPU."""
    for name in ASKED_IN:
        module = importlib.import_module(name)
        assert hasattr(module, "on_host")
        monkeypatch.setattr(module, "on_host", lambda *_: False)
