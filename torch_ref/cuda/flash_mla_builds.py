"""Which FlashMLA is importable, and which of the kernels it offers.

sgl-flash-mla and deepseek-ai's own build are both the module `flash_mla`, told apart by the
argument `use_legacy`, behind which sgl-flash-mla keeps the kernels of Hopper; vLLM vendors a third.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Build:
    """An importable FlashMLA: its distribution, version, function, and how it selects kernels."""

    name: str
    version: str
    module: Any
    function: Callable[..., Any]
    takes_use_legacy: bool
    legacy_missing: bool = False


def look_for_build(
    function_name: str, parameters: Sequence[str]
) -> tuple[Build | None, tuple[str, ...]]:
    """The first build that has the function, and what stood in the way of those before it.

    parameters are those that an older build's function hasn't got. Imports the builds, which loads
    their CUDA libraries.
    """
    tried = []
    for module_name, package in (
        ("flash_mla", "flash_mla"),
        ("vllm.third_party.flashmla.flash_mla_interface", "vllm"),
    ):
        if importlib.util.find_spec(package) is None:
            tried.append(f"{package} isn't installed")
            continue
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # loading CUDA libraries can fail in any way
            tried.append(f"{module_name} doesn't import ({type(error).__name__}: {error})")
            continue
        function = getattr(module, function_name, None)
        if function is None:
            tried.append(f"{module_name} has no {function_name}")
            continue
        accepted = inspect.signature(function).parameters
        if not set(parameters) <= accepted.keys():
            tried.append(f"{module_name} is too old: no {' and '.join(parameters)}")
            continue
        return _describe(module, package, function, "use_legacy" in accepted), tuple(tried)
    return None, tuple(tried)


def plans_while_launching(build: Build) -> bool:
    """Whether its get_mla_metadata gives an empty schedule, which the first launch fills."""
    metadata = getattr(build.module, "get_mla_metadata", None)
    return metadata is not None and all(
        parameter.default is not parameter.empty
        or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(metadata).parameters.values()
    )


def _describe(
    module: Any, package: str, function: Callable[..., Any], takes_use_legacy: bool
) -> Build:
    if package == "vllm":
        name, distributions = "vllm (vendored FlashMLA)", ("vllm",)
    elif takes_use_legacy:
        name, distributions = "sgl-flash-mla", ("sgl-flash-mla",)
    else:
        name, distributions = "deepseek-ai FlashMLA", ("flash_mla", "flash-mla")
    has_legacy = getattr(module, "has_legacy", None)
    return Build(
        name,
        _version(module, distributions),
        module,
        function,
        takes_use_legacy,
        legacy_missing=takes_use_legacy and has_legacy is not None and not has_legacy(),
    )


def _version(module: Any, distributions: tuple[str, ...]) -> str:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(module, "__version__", "unknown"))
