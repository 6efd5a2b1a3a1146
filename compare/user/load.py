"""The function that MODULE:FUNCTION or FILE.py:FUNCTION names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from compare.protocol.implementation import UnknownImplementation


def is_user_name(name: str) -> bool:
    """Whether a name is one of ours to look up: MODULE:FUNCTION or FILE.py:FUNCTION."""
    return ":" in name and not name.startswith("golden:")


def load(name: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION or FILE.py:FUNCTION names, its module imported here.

    The working directory and a file's own folder come first on sys.path. UnknownImplementation
    where the file, the module or the function doesn't exist; whatever the module raises while it
    is imported goes through.
    """
    home, _, path = name.rpartition(":")
    if not home or not path:
        raise UnknownImplementation(
            f"{name!r} isn't a function's name; write MODULE:FUNCTION or FILE.py:FUNCTION"
        )
    _first_on_path(Path.cwd())
    module = _load_file(Path(home)) if home.endswith(".py") else _load_module(home)
    value: Any = module
    for word in path.split("."):
        if not hasattr(value, word):
            names = [n for n in vars(value) if callable(getattr(value, n, None))]
            nearest = difflib.get_close_matches(word, names, n=1)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise UnknownImplementation(f"{home} has no function {path!r}{hint}")
        value = getattr(value, word)
    if not callable(value):
        raise UnknownImplementation(f"{name} is a {type(value).__name__}, not a function")
    return value


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UnknownImplementation(f"there is no file {file}")
    _first_on_path(file.resolve().parent)
    # Its own name, so that what it pickles or compiles finds it; not in the place of another's.
    name = file.stem if file.stem not in sys.modules else f"candidate_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module that was asked for, or a package around it: not one that it imports.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UnknownImplementation(
            f"there is no module {error.name!r}, asked for by {name!r}"
        ) from None


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
