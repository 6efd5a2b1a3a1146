"""A case's tensors as the content of one compressed file.

It is a safetensors file under gzip. A tensor is called NAME:DTYPE there and stands byte by byte:
uint8 [bytes of an element, *shape], the first bytes of all elements, then their second ones. The
high bytes of floating-point numbers are alike, so that gzip takes hardly more room than xz does of
whole elements, and is read several times as fast.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping

import ml_dtypes  # noqa: F401  gives NumPy the names bfloat16 and float8_e4m3fn
import numpy as np

from compare.protocol.tensor_file import tensor_bytes, tensors_of

ENDING = ".safetensors.gz"


def pack(tensors: Mapping[str, np.ndarray], case: str) -> bytes:
    """The content of a case's file: the same for the same tensors, whenever it is written."""
    planes = {f"{name}:{array.dtype.name}": _planes(array) for name, array in tensors.items()}
    return gzip.compress(tensor_bytes(planes, {"case": case}), 9, mtime=0)


def unpack(content: bytes) -> dict[str, np.ndarray]:
    """The tensors that pack was given. Raises ValueError with what is wrong."""
    try:
        unzipped = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it isn't a readable gzip file ({error})") from error
    stored, _ = tensors_of(unzipped)
    tensors = {}
    for stored_name, planes in stored.items():
        name, _, dtype = stored_name.rpartition(":")
        tensors[name] = _elements(stored_name, planes, dtype)
    return tensors


def _planes(array: np.ndarray) -> np.ndarray:
    return np.moveaxis(np.ascontiguousarray(array)[..., None].view(np.uint8), -1, 0)


def _elements(name: str, planes: np.ndarray, word: str) -> np.ndarray:
    try:
        dtype = np.dtype(word)
    except TypeError as error:
        raise ValueError(f"{name} is of no dtype that is known here") from error
    if planes.dtype != np.uint8 or planes.ndim == 0 or len(planes) != dtype.itemsize:
        raise ValueError(
            f"{name} is {planes.dtype.name} {list(planes.shape)}, not {dtype.itemsize} bytes an "
            "element"
        )
    return np.ascontiguousarray(np.moveaxis(planes, 0, -1)).view(dtype)[..., 0]
