"""Safetensors files with bfloat16 and float8 tensors as NumPy arrays (through ml_dtypes), read
whole and written atomically: shared by recorded results and bundles."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16, which safetensors asks for
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces `path` by `content`, or leaves it as it was: a reader never sees half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)  # mkstemp's file is its owner's alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def tensor_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The content of a safetensors file; strides don't matter."""
    # save() reads from an array's first byte on and takes no notice of strides.
    dense = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return save(dense, metadata=dict(metadata))


def tensors_of(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Every tensor of a file's content by name, and its metadata; all of dtypes that NumPy itself
    has. Raises ValueError with what is wrong.
    """
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it isn't a readable safetensors file ({error})") from error
    return tensors, header.get("__metadata__", {})


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Every tensor of a file by name, and its metadata.

    Raises ValueError with what is wrong, without the path: the caller knows what the file was for.
    """
    if not path.is_file():
        raise ValueError("there is no such file")
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            narrow = [n for n in names if file.get_slice(n).get_dtype().startswith(_NARROW)]
            tensors = {name: file.get_tensor(name) for name in names if name not in narrow}
            metadata = dict(file.metadata() or {})
        if narrow:
            tensors |= _read_by_torch(path, narrow)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"it isn't a readable safetensors file ({error})") from error
    return tensors, metadata


_NARROW = ("F8", "F6", "F4")


def _read_by_torch(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Tensors of less than two bytes a number, whose dtypes safetensors doesn't find in NumPy."""
    from compare.protocol.arrays import to_numpy

    with safe_open(path, framework="pt") as file:
        return {name: to_numpy(file.get_tensor(name), name) for name in names}
