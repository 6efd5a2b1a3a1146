from __future__ import annotations

import jax
import numpy as np
import pytest

import jax_impl
from compare.houses import jax_backend
from compare.run import registry
from compare.suites.table import make_inputs, parse_case


@pytest.mark.parametrize(
    ("name", "small", "quick"),
    [("pallas-interpret", 0, True), ("xla", 0, False), ("xla", jax_backend.SMALL, True)],
)
@pytest.mark.parametrize("raises", [False, True])
def test_programs_that_run_once_are_compiled_without_optimisation(
    name: str, small: int, quick: bool, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []

    def attend(q, *_args, **_options):
        met.append(jax.config.read("jax_disable_most_optimizations"))
        if raises:
            raise ValueError("no")
        shape = q.shape[:2]
        return np.zeros((*shape, 512), q.dtype), np.zeros(shape), np.zeros(shape)

    monkeypatch.setattr(jax_impl, "sparse_prefill", attend)
    monkeypatch.setattr(jax_backend, "SMALL", small)
    before = jax.config.read("jax_disable_most_optimizations")
    try:
        registry.find(name, "cpu").run(make_inputs(parse_case("sparse-prefill:s_kv=40,h=1")))
    except ValueError:
        assert raises
    assert met == [quick]
    assert jax.config.read("jax_disable_most_optimizations") == before
