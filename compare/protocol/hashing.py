"""Hashes of inputs: of names, dtypes, shapes and values, not of strides."""

from __future__ import annotations

import hashlib

import numpy as np


def add_array(digest: hashlib._Hash, name: str, array: np.ndarray | None) -> None:
    """Puts an array, or that there is none, into a digest under its name."""
    if array is None:
        digest.update(f" {name}=none".encode())
        return
    digest.update(f" {name}:{array.dtype.name}{list(array.shape)}".encode())
    for block in range(0, len(array), 256):
        digest.update(np.ascontiguousarray(array[block : block + 256]).view(np.uint8))
