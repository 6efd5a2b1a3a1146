"""Small fake packages, so that the adapters are tested without the builds they adapt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that looks like a Hopper; the fake kernels run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a data-centre Blackwell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (10, 0))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """install("a.b.c", source, a={"__version__": "1"}) makes that module and its packages."""
    names = ("flash_mla", "flashinfer", "vllm")
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in names}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def install_module(dotted: str, source: str, package_source: str = "") -> None:
        *packages, _ = dotted.split(".")
        folder = tmp_path
        for i, package in enumerate(packages):
            folder = folder / package
            folder.mkdir(exist_ok=True)
            init = folder / "__init__.py"
            if not init.exists():
                init.write_text(package_source if i == 0 else "")
        if packages:
            (tmp_path.joinpath(*packages) / f"{dotted.split('.')[-1]}.py").write_text(source)
        else:
            (tmp_path / f"{dotted}.py").write_text(source)

    yield install_module
    for name in list(sys.modules):
        if name.split(".")[0] in names:
            del sys.modules[name]
    sys.modules.update(kept)
