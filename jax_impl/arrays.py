"""Arrays as callers hand them over: read off as they are, and only then made JAX's.

Dtypes are read off the caller's own objects: with 64-bit types disabled, jnp.asarray turns an
int64 array into an int32 one without a word.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def shape_of(value: Any, name: str, axes: str, dtypes: Sequence[str]) -> tuple[int, ...]:
    """The value's shape, once it is an array of one of the dtypes with as many axes as named."""
    expected = " or ".join(dtypes)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"{name} must be a {expected} array {axes}; got {type(value).__name__}")
    got = dtype_name(value.dtype)
    if got not in dtypes:
        raise ValueError(f"{name} must be {expected}; got {got}")
    shape = tuple(int(extent) for extent in value.shape)
    if len(shape) != axes.count(",") + 1:
        raise ValueError(f"{name} must be {axes}; got shape {list(shape)}")
    return shape


def dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype, torch's dtypes included."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    return np.dtype(dtype).name


def to_jax(array: Any) -> jax.Array:
    """The array as JAX's; one of another library through DLPack, without a copy if compact."""
    if isinstance(array, (jax.Array, np.ndarray)):
        return jnp.asarray(array)
    if hasattr(array, "contiguous"):
        array = array.contiguous()
    return jax.dlpack.from_dlpack(array)


def known_number(value: Any, name: str) -> float:
    """A Python or NumPy number that is known when the call is made, finite also as float32."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ValueError(
            f"{name} must be a Python or NumPy number, known when the call is made; "
            f"got {type(value).__name__}"
        )
    number = float(value)
    # Kernels work in base 2: the product with log2(e) has to be a float32 as well.
    largest = float(np.finfo(np.float32).max) / math.log2(math.e)
    if not math.isfinite(number) or abs(number) > largest:
        raise ValueError(f"{name} must be finite, also as a float32; got {number!r}")
    return number


def is_traced(*values: object) -> bool:
    """Whether any of the values stands for data that is not known yet (inside jit, vmap, ...)."""
    return any(isinstance(value, Tracer) for value in values)
