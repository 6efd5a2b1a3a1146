from __future__ import annotations

import pytest

from tests.jax_impl.kv_cache.model import CPU_BACKENDS


@pytest.fixture(params=[*CPU_BACKENDS, pytest.param("pallas", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
