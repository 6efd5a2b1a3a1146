"""What every test is under: the marker `gpu` names what this machine lacks; what XLA compiles is
kept for the next time, for all processes of a test."""

from __future__ import annotations

import os

import pytest

from compare.houses.xla_cache import programs_folder, settings


def pytest_configure() -> None:
    if (folder := programs_folder()) is not None:
        for name, value in settings(folder).items():
            os.environ.setdefault(name.upper(), str(value))


def _why_no_hopper() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "needs a Hopper GPU; there is none here"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs a Hopper GPU; this one is an {torch.cuda.get_device_name()}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and (reason := _why_no_hopper()):
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=reason))
