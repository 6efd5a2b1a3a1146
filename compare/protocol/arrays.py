"""NumPy to torch and jax, and back, without a cast: bits, dtypes and strides stay as they are.

NumPy has bfloat16 and float8 through ml_dtypes; torch takes their bits through an integer view.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

_TORCH_TO_NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_NUMPY_TO_TORCH = {dtype: name for name, dtype in _TORCH_TO_NUMPY.items()}
_BITS = {1: np.dtype(np.uint8), 2: np.dtype(np.int16)}


def span(array: np.ndarray) -> np.ndarray | None:
    """The memory from an array's first to its last element as one flat view, gaps included.

    None where strides are negative or no multiple of the element size: such an array has no
    counterpart in torch.
    """
    size = array.itemsize
    if array.size == 0 or any(step < 0 or step % size for step in array.strides):
        return None
    last = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (last // size + 1,), (size,))


def to_torch(array: np.ndarray, device: str = "cpu", *, copy: bool = False) -> torch.Tensor:
    """The array as a torch tensor on `device`, with the array's own strides and what lies between.

    On the CPU the memory is shared, unless `copy` or the array is read-only.
    """
    import torch

    flat = span(array)
    strides = [step // array.itemsize for step in array.strides]
    if flat is None:
        array = np.ascontiguousarray(array)
        flat, strides = array.reshape(-1), None
    if copy or not array.flags.writeable:
        flat = flat.copy()
    name = _NUMPY_TO_TORCH.get(flat.dtype)
    if name is None:
        tensor = torch.from_numpy(flat)
    else:
        tensor = torch.from_numpy(flat.view(_BITS[flat.itemsize])).view(getattr(torch, name))
    tensor = tensor.to(device)
    if strides is None:
        return tensor.reshape(array.shape)
    return tensor.as_strided(array.shape, strides)


def to_jax(array: np.ndarray, device: Any = None) -> Any:
    """The array as a jax array; ValueError where jax would change its dtype (int64 without x64)."""
    import jax

    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ValueError(
            f"jax without x64 can't hold {array.dtype.name}; it would make "
            f"{jax.dtypes.canonicalize_dtype(array.dtype).name} of it"
        )
    return jax.device_put(np.ascontiguousarray(array), device)


def to_numpy(value: Any, name: str = "array") -> np.ndarray:
    """A torch, jax or NumPy array as NumPy, untouched; TypeError for anything else."""
    if isinstance(value, np.ndarray):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _torch_to_numpy(value, name)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array):
        return np.asarray(value)
    if isinstance(value, np.generic):
        return np.asarray(value)
    raise TypeError(
        f"{name} is a {type(value).__module__}.{type(value).__name__}; "
        "accepted: a torch tensor, a jax array or a NumPy array"
    )


def _torch_to_numpy(tensor: torch.Tensor, name: str) -> np.ndarray:
    import torch

    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "tensor without data (meta)" if tensor.is_meta else f"{tensor.layout} tensor"
        raise TypeError(f"{name} is a {kind}; accepted: a dense tensor")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    dtype = _TORCH_TO_NUMPY.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        return tensor.numpy()
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tensor.view(bits).numpy().view(dtype)
