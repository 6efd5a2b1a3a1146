"""Which FlashMLA is importable, which of its kernels it offers, and what all of them refuse.

sgl-flash-mla and deepseek-ai's own build are both the module `flash_mla`, told apart by the
argument `use_legacy`, behind which sgl-flash-mla keeps the kernels of Hopper; vLLM vendors a third.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Build:
    """An importable FlashMLA: its distribution, version, function, and how it selects kernels."""

    name: str
    version: str
    module: Any
    function: Callable[..., Any]
    takes_use_legacy: bool
    legacy_missing: bool = False


@dataclass(frozen=True)
class Kernel:
    """One of FlashMLA's kernels: its name in sentences, its function, and where it runs.

    parameters are those that an older build's function hasn't got. Each kernel runs on Hopper;
    blackwell says that it runs on compute capability 10 too. legacy_part says what of a decode
    kernel a build without legacy kernels lacks.
    """

    name: str
    function: str
    parameters: tuple[str, ...]
    blackwell: bool
    legacy_part: str = ""

    def find_build(self) -> Build | None:
        """The first importable build with this function; None if there is none."""
        return look_for_build(self.function, self.parameters)[0]

    def usable_build(self) -> Build:
        """The build that it can be launched from; NotImplementedError says why there is none."""
        if not torch.cuda.is_available():
            raise NotImplementedError("FlashMLA needs a CUDA GPU and torch sees none")
        major, minor = torch.cuda.get_device_capability()
        if major not in ((9, 10) if self.blackwell else (9,)):
            where = (
                "9 (Hopper) and 10 (Blackwell data centre)" if self.blackwell else "9 (Hopper) only"
            )
            raise NotImplementedError(
                f"{self.name} is built for compute capability {where}; this GPU has {major}.{minor}"
            )
        build, tried = look_for_build(self.function, self.parameters)
        if build is None:
            raise NotImplementedError("no FlashMLA build is importable: " + "; ".join(tried))
        return build

    def usable_decode_build(self) -> Build:
        """usable_build of a decode kernel, whose schedule the first launch is to plan."""
        build = self.usable_build()
        if build.legacy_missing:
            raise NotImplementedError(
                f"{build.name} {build.version} was built without its legacy kernels, "
                f"{self.legacy_part}"
            )
        if not plans_while_launching(build):
            raise NotImplementedError(
                f"{build.name} {build.version} is too old: its get_mla_metadata wants lengths, "
                "where this adapter has the first launch fill an empty schedule"
            )
        return build


def refusal(find: Callable[..., object], *arguments: object) -> str | None:
    """The sentence with which find(*arguments) raises NotImplementedError; None if it doesn't."""
    try:
        find(*arguments)
    except NotImplementedError as error:
        return str(error)
    return None


def scale_reason(sm_scale: float | None) -> str | None:
    """Why no kernel can serve this sm_scale; None if they can, or if it isn't known."""
    if sm_scale is None or sm_scale > 0:
        return None
    return (
        f"sm_scale = {sm_scale}: the kernel multiplies its -inf mask by it, so that 0 gives NaN "
        "and a negative one breaks the maximum; accepted is a positive number"
    )


def heads_reason(heads: int | None) -> str | None:
    """Why no sparse kernel can serve this many heads; None if they can, or if it isn't known."""
    if heads is None or 1 <= heads <= 128:
        return None
    return f"heads = {heads}: the kernel takes 64 or 128; accepted (padded) are 1 to 128"


def pad_heads(
    q: Tensor, attn_sink: Tensor | None, notes: list[str]
) -> tuple[Tensor, Tensor | None]:
    """q [T, H, D] and the sinks for the 64 or 128 heads that sparse kernels take; notes say so."""
    T, H, D = q.shape
    padded = 64 if H <= 64 else 128
    if padded == H:
        return q, None if attn_sink is None else attn_sink.contiguous()
    notes.append(f"heads padded from {H} to {padded} (zero queries, sink -inf)")
    q = torch.cat([q, q.new_zeros(T, padded - H, D)], dim=1)
    if attn_sink is not None:
        attn_sink = torch.cat([attn_sink, attn_sink.new_full((padded - H,), -math.inf)])
    return q, attn_sink


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
