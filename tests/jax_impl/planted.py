"""Faults planted in the source of a kernel's body, for tests that have to find them."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator

import jax
import pytest

FOUND = (AssertionError, jax.errors.JaxRuntimeError)
"""How a fault shows: a wrong result or a race, or what the interpreter raised in its callbacks. A
fault that doesn't even run raises something else, and was planted wrongly."""

Plant = Callable[[types.ModuleType, str, str], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """(module, old, new): every user of the module gets those of a copy with `old` replaced."""

    def replace(module: types.ModuleType, old: str, new: str) -> None:
        source = inspect.getsource(module)
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        faulty = types.ModuleType(module.__name__)
        faulty.__dict__.update(__file__=module.__file__, __package__=module.__package__)
        monkeypatch.setitem(sys.modules, module.__name__, faulty)
        exec(compile(source.replace(old, new), str(module.__file__), "exec"), faulty.__dict__)
        for name, user in list(sys.modules.items()):
            if not name.startswith("jax_impl.") or user is faulty:
                continue
            for attribute, value in list(vars(user).items()):
                if value is module:
                    monkeypatch.setattr(user, attribute, faulty)
                elif getattr(value, "__module__", None) == module.__name__:
                    monkeypatch.setattr(user, attribute, getattr(faulty, attribute))

    yield replace
    monkeypatch.undo()
    jax.clear_caches()
