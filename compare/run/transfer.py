"""Inputs and results between processes: arrays as .npy files that the other side maps.

bfloat16 and float8, which .npy can't name, are stored as unsigned integers of their width with the
dtype's name beside them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - gives np.dtype the names bfloat16 and float8_*
import numpy as np

from compare.cases.inputs import Inputs
from compare.run.convert import span
from compare.run.result import Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """An array in a file. strides: in elements, of a view stored with its gaps; None: dense."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


def pack(value: Inputs | Result, folder: Path) -> Any:
    """The dataclass with each of its arrays written to `folder` and replaced by a Stored."""
    changed = {
        field.name: _store(array, folder / f"{field.name}.npy")
        for field in dataclasses.fields(value)
        if isinstance(array := getattr(value, field.name), np.ndarray)
    }
    return dataclasses.replace(value, **changed) if changed else value


def unpack(value: Any) -> Any:
    """The dataclass with its arrays mapped from their files, which are then unlinked: the memory
    goes when the arrays do, and nothing is left behind by a process that dies. A write to an array
    stays in this process."""
    changed = {
        field.name: _fetch(stored)
        for field in dataclasses.fields(value)
        if isinstance(stored := getattr(value, field.name), Stored)
    }
    return dataclasses.replace(value, **changed) if changed else value


def _store(array: np.ndarray, path: Path) -> Stored:
    strides = None
    flat = None if array.flags.c_contiguous else span(array)
    if flat is not None:
        strides = tuple(step // array.itemsize for step in array.strides)
    held = np.ascontiguousarray(array) if flat is None else flat
    # NumPy's own kinds are b, i, u, f and c; ml_dtypes says V, or f for some.
    if held.dtype.kind == "V" or held.dtype.num >= 256:
        held = held.view(f"u{held.itemsize}")
    np.save(path, held, allow_pickle=False)
    return Stored(path=path, dtype=array.dtype.name, shape=array.shape, strides=strides)


def _fetch(stored: Stored) -> np.ndarray:
    dtype = np.dtype(stored.dtype)
    if 0 in stored.shape:
        array = np.load(stored.path, allow_pickle=False)
    else:
        array = np.load(stored.path, allow_pickle=False, mmap_mode="c")
    stored.path.unlink()
    if array.dtype != dtype:
        array = array.view(dtype)
    if stored.strides is None:
        return array.reshape(stored.shape)
    steps = tuple(step * dtype.itemsize for step in stored.strides)
    return np.lib.stride_tricks.as_strided(array, stored.shape, steps)


def fingerprint(inputs: Inputs) -> str:
    """A hash of every scalar, shape and dtype and of up to 64 rows of each array: tells in a
    moment whether two processes hold the same inputs."""
    digest = hashlib.sha256()
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, np.ndarray):
            rows = np.linspace(0, len(value) - 1, min(len(value), 64)).astype(int)
            digest.update(f"{field.name}:{value.dtype.name}{list(value.shape)}".encode())
            digest.update(np.ascontiguousarray(value[rows]).view(np.uint8))
        elif field.name != "case":
            digest.update(f"{field.name}={value!r}".encode())
    return digest.hexdigest()
