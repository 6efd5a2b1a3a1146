from __future__ import annotations

import pytest

from tests.jax_impl.prefill.problems import CPU_BACKENDS


@pytest.fixture(params=[*CPU_BACKENDS, pytest.param("pallas", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
