"""Where a run took place, as text by name: the part of a report that lets another machine repeat
it.

Nothing here starts a GPU context or fails: what can't be found out isn't in the dictionary.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

from compare._revision import revision
from compare._version import version as program_version
from compare.generate.streams import GENERATOR_VERSION

# FlashMLA is published as sgl-flash-mla; builds from its own repository call themselves
# flash_mla or flash-mla, with the commit in the version. The empty placeholder of that name has
# version 0.0.0.
_FLASH_MLA_BUILDS = ("sgl-flash-mla", "flash-mla", "flash_mla")
_LIBRARIES = ("jax", "jaxlib", "torch", "numpy", "ml_dtypes", "vllm")


@functools.cache
def environment() -> dict[str, str]:
    """Versions of this program, Python, the libraries and the FlashMLA build, the GPUs and their
    driver, the CPU, the operating system, the git revision of this code (``-dirty`` behind it
    when files differ from it) and the version of the input generator. Keys are stable words,
    e.g. ``jax``, ``gpu``, ``revision``.
    """
    facts: dict[str, str | None] = {
        "mla-crosscheck": program_version(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        "flash_mla": flash_mla_build(),
        "cuda": _torch_cuda(),
        "gpu": _nvidia_smi("name"),
        "driver": _nvidia_smi("driver_version"),
        "cpu": _cpu(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "revision": revision(),
        "generator": str(GENERATOR_VERSION),
    }
    return {name: value for name, value in facts.items() if value}


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def flash_mla_build() -> str | None:
    """``NAME VERSION`` of the installed FlashMLA distribution, or None."""
    for name in _FLASH_MLA_BUILDS:
        if (found := version(name)) and found != "0.0.0":
            return f"{name} {found}"
    return None


def _nvidia_smi(field: str) -> str | None:
    """A field of every GPU, each value once: ``NVIDIA H200`` or ``2 x NVIDIA H200``."""
    text = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    if not text:
        return None
    values = [line.strip() for line in text.splitlines() if line.strip()]
    if field == "name" and len(values) > 1 and len(set(values)) == 1:
        return f"{len(values)} x {values[0]}"
    return ", ".join(dict.fromkeys(values))


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for, read without importing torch."""
    found = version("torch")
    _, _, local = (found or "").partition("+cu")
    return f"{local[:-1]}.{local[-1]}" if local.isdigit() and len(local) > 1 else None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or None


def _output(*command: str) -> str | None:
    """What a command printed, or None when it is missing, failed or took longer than ten
    seconds.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
