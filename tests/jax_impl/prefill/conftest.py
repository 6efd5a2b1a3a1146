from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator

import jax
import pytest

from jax_impl.prefill.kernel_sm90 import launch
from tests.jax_impl.prefill.problems import CPU_BACKENDS


@pytest.fixture(params=[*CPU_BACKENDS, pytest.param("pallas", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def plant(monkeypatch) -> Iterator:
    def replace(module: types.ModuleType, old: str, new: str) -> None:
        """Puts a copy of the module with `old` replaced in the place of its functions."""
        source = inspect.getsource(module)
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        faulty = types.ModuleType(module.__name__)
        faulty.__dict__.update(__file__=module.__file__, __package__=module.__package__)
        exec(compile(source.replace(old, new), str(module.__file__), "exec"), faulty.__dict__)
        package = launch.__package__
        assert package is not None
        for name, user in list(sys.modules.items()):
            if not name.startswith(package):
                continue
            for attribute, value in list(vars(user).items()):
                if value is module:
                    monkeypatch.setattr(user, attribute, faulty)
                elif getattr(value, "__module__", None) == module.__name__ and user is not module:
                    monkeypatch.setattr(user, attribute, getattr(faulty, attribute))

    yield replace
    monkeypatch.undo()
    jax.clear_caches()
