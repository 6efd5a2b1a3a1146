"""Arrays as callers hand them over: read off as they are, and only then made JAX's.

Dtypes are read off the caller's own objects: with 64-bit types disabled, jnp.asarray turns an
int64 array into an int32 one without a word.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# Kernels work in base 2: the product with log2(e) has to be a float32 as well.
LARGEST_SCALE = float(np.finfo(np.float32).max) / math.log2(math.e)


def shape_of(value: Any, name: str, axes: str, dtypes: Sequence[str]) -> tuple[int, ...]:
    """The value's shape, once it is an array of one of the dtypes with the axes that are named.

    `axes` may offer several forms, as in "[S, D] or [S, 1, D]"; an axis called 1 has size 1.
    """
    expected = " or ".join(dtypes)
    if not _is_array(value):
        article = "an" if expected[0] in "aeiou" else "a"
        raise ValueError(
            f"{name} must be {article} {expected} array {axes}; got {type(value).__name__}"
        )
    got = dtype_name(value.dtype)
    if got not in dtypes:
        raise ValueError(f"{name} must be {expected}; got {got}")
    shape = tuple(int(extent) for extent in value.shape)
    for form in axes.split(" or "):
        wanted = [axis for axis in form.strip("[] ").split(", ") if axis]
        if len(wanted) == len(shape) and all(
            extent == 1 for axis, extent in zip(wanted, shape, strict=True) if axis == "1"
        ):
            break
    else:
        raise ValueError(f"{name} must be {axes}; got shape {list(shape)}")
    if getattr(value, "requires_grad", False):
        raise ValueError(
            f"{name} must be without a gradient, which would end here unseen; got a "
            f"{type(value).__name__} with requires_grad (detach() gives one without)"
        )
    return shape


def _is_array(value: Any) -> bool:
    if isinstance(value, np.ma.MaskedArray):
        return False  # what it masks would be taken for values
    if isinstance(value, (jax.Array, np.ndarray)):
        return True
    return all(hasattr(value, word) for word in ("shape", "dtype", "__dlpack__"))


def dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype, torch's dtypes included; one of foreign byte order says so."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        known = np.dtype(dtype)
    except TypeError:
        return text
    return known.name if known.isnative else f"{known.name} of foreign byte order"


def to_jax(array: Any, name: str = "array") -> jax.Array:
    """The array as JAX's; one of another library through DLPack, without a copy if compact.

    ValueError where DLPack can't hand it over: a sparse one, or one on a device that JAX has not.
    """
    if isinstance(array, jax.Array):
        return array
    if isinstance(array, np.ndarray):
        # A copy, as JAX may use the memory that it is given. jnp.asarray would compile one a shape.
        return jax.device_put(np.array(array))
    try:
        compact = array.contiguous() if hasattr(array, "contiguous") else array
        return jax.dlpack.from_dlpack(compact)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be dense and on a device that JAX has; got a {type(array).__name__} that "
            f"DLPack can't hand over ({str(error).splitlines()[0]})"
        ) from error


def shares_memory(array: Any) -> bool:
    """Whether `to_jax` may leave the array's memory to its owner, who can write to it later.

    A computation that JAX has only been told to start then reads what is there by that time.
    """
    return not isinstance(array, (jax.Array, np.ndarray))


def true_or_false(value: Any, name: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}")


def known_number(value: Any, name: str) -> float:
    """A Python or NumPy number that is known when the call is made, finite also as float32."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ValueError(
            f"{name} must be a Python or NumPy number, known when the call is made; "
            f"got {type(value).__name__}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > LARGEST_SCALE:
        raise ValueError(f"{name} must be finite, also as a float32; got {_short(value)}")
    return number


def _short(value: Any) -> str:
    text = repr(float(value)) if isinstance(value, (float, np.floating)) else str(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def is_traced(*values: object) -> bool:
    """Whether any of the values stands for data that is not known yet (inside jit, vmap, ...)."""
    return any(isinstance(value, Tracer) for value in values)


def on_host(*arrays: Any) -> bool:
    """Whether all of them are known and each on one CPU, where NumPy reads it without a copy."""
    return not is_traced(*arrays) and all(
        isinstance(array, (np.ndarray, np.generic))
        or [d.platform for d in array.devices()] == ["cpu"]
        for array in arrays
    )


def namespace(*arrays: Any) -> Any:
    """numpy if all of them are NumPy's, else jax.numpy: where the two mean the same."""
    return np if all(isinstance(array, (np.ndarray, np.generic)) for array in arrays) else jnp


def compiled_or_numpy[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function written with `namespace`: NumPy runs it on arrays that are `on_host`,
    since compiling it for a batch takes longer than that, and jax.jit on all others.

    static: arguments that jit has to know. Results are NumPy's only if all arrays are.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        compiled: Any = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            given = [x for x in jax.tree.leaves((args, named)) if hasattr(x, "shape")]
            if not on_host(*given):
                return compiled(*args, **named)
            args, named = jax.tree.map(_as_numpy, (args, named))
            others = [x for x in given if isinstance(x, jax.Array)]
            result = function(*args, **named)
            if not others:
                return result
            beside = next((x for x in others if x.committed), others[0])
            return jax.tree.map(lambda x: to_jax_beside(x, beside), result)

        return call

    return decorate


def bits_as(array: Any, dtype: Any) -> Any:
    """The same bits as numbers of another dtype of the same size."""
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    return jax.lax.bitcast_convert_type(array, dtype)


def _as_numpy(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, jax.Array) else value


def to_jax_beside(array: np.ndarray, other: Any) -> Any:
    """NumPy's array as JAX's on the one device of another, and bound to it if that one is; as it is
    where the other is NumPy's too."""
    if not isinstance(other, jax.Array):
        return array
    (device,) = other.devices()
    with jax.default_device(device):
        return jax.device_put(array, device if other.committed else None)
