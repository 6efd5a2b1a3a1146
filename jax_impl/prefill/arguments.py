"""Checks what a caller hands to sparse prefill, before anything converts it.

Dtypes are read off the caller's own objects: with 64-bit types disabled, jnp.asarray turns an
int64 index into an int32 one without a word, and 2**31 + 5 would become a hole.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.prefill.result import is_traced

D_QK = (512, 576)
D_V = 512
MAX_HEADS = 128

_BFLOAT16 = "bfloat16"
_FLOAT32 = "float32"
_INT32 = "int32"


class Arguments(NamedTuple):
    """The checked arguments as JAX arrays, without the axis of the single KV head."""

    q: jax.Array  # [T, H, D] bfloat16
    kv: jax.Array  # [S, D] bfloat16
    indices: jax.Array  # [T, K] int32
    sm_scale: float
    attn_sink: jax.Array | None  # [H] float32
    topk_length: jax.Array | None  # [T] int32


def check(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any,
    *,
    d_v: Any,
    attn_sink: Any,
    topk_length: Any,
    validate: bool,
) -> Arguments:
    """Raises ValueError or NotImplementedError for what can't be served, else converts."""
    num_tokens, num_heads, d_qk = _shape(q, "q", "[T, H, D]", _BFLOAT16)
    if not 1 <= num_heads <= MAX_HEADS:
        raise NotImplementedError(f"q must have 1 to {MAX_HEADS} heads; got {num_heads}")
    if d_qk not in D_QK:
        raise NotImplementedError(f"q must have a width D of 512 or 576; got {d_qk}")
    if d_v != D_V:
        raise NotImplementedError(f"d_v must be {D_V}; got {d_v!r}")

    kv_shape = _shape(kv, "kv", "[S, D] or [S, 1, D]", _BFLOAT16)
    if kv_shape[-1] != d_qk:
        raise ValueError(f"kv must be as wide as q, D = {d_qk}; got {kv_shape[-1]}")
    index_shape = _shape(indices, "indices", "[T, K] or [T, 1, K]", _INT32)
    if index_shape[0] != num_tokens:
        raise ValueError(
            f"indices must have a row for each of the {num_tokens} tokens of q; "
            f"got {index_shape[0]}"
        )
    topk = index_shape[-1]
    if topk < 1:
        raise ValueError("indices must have at least one slot a row; got K = 0")

    if attn_sink is not None:
        (sink_heads,) = _shape(attn_sink, "attn_sink", "[H]", _FLOAT32)
        if sink_heads != num_heads:
            raise ValueError(
                f"attn_sink must have a value for each of the {num_heads} heads of q; "
                f"got {sink_heads}"
            )
    if topk_length is not None:
        (length_rows,) = _shape(topk_length, "topk_length", "[T]", _INT32)
        if length_rows != num_tokens:
            raise ValueError(
                f"topk_length must have a value for each of the {num_tokens} tokens of q; "
                f"got {length_rows}"
            )
    scale = _scale(sm_scale)

    checked = Arguments(
        q=_to_jax(q),
        kv=_to_jax(kv).reshape(kv_shape[0], d_qk),
        indices=_to_jax(indices).reshape(num_tokens, topk),
        sm_scale=scale,
        attn_sink=None if attn_sink is None else _to_jax(attn_sink),
        topk_length=None if topk_length is None else _to_jax(topk_length),
    )
    if validate and checked.topk_length is not None and not is_traced(checked.topk_length):
        _check_lengths(np.asarray(checked.topk_length), topk)
    return checked


def _shape(value: Any, name: str, axes: str, dtype: str) -> tuple[int, ...]:
    """The value's shape, once its dtype and rank are what `axes` and `dtype` say.

    Where `axes` offers a form with an axis of size 1, that axis is required to be of size 1.
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"{name} must be a {dtype} array {axes}; got {type(value).__name__}")
    got = _dtype_name(value.dtype)
    if got != dtype:
        raise ValueError(f"{name} must be {dtype}; got {got}")
    shape = tuple(int(extent) for extent in value.shape)
    forms = [form.strip(" []").split(", ") for form in axes.split(" or ")]
    for form in forms:
        if len(form) == len(shape) and all(
            extent == 1 for axis, extent in zip(form, shape, strict=True) if axis == "1"
        ):
            return shape
    raise ValueError(f"{name} must be {axes}; got shape {list(shape)}")


def _dtype_name(dtype: Any) -> str:
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    return np.dtype(dtype).name


def _to_jax(array: Any) -> jax.Array:
    if isinstance(array, (jax.Array, np.ndarray)):
        return jnp.asarray(array)
    # Any other library: DLPack shares the memory, but only of a compact array.
    if hasattr(array, "contiguous"):
        array = array.contiguous()
    return jax.dlpack.from_dlpack(array)


def _scale(sm_scale: Any) -> float:
    if isinstance(sm_scale, np.ndarray) and sm_scale.ndim == 0:
        sm_scale = sm_scale.item()
    if isinstance(sm_scale, (bool, np.bool_)) or not isinstance(sm_scale, numbers.Real):
        raise ValueError(
            "sm_scale must be a Python or NumPy number, known when the call is made; "
            f"got {type(sm_scale).__name__}"
        )
    scale = float(sm_scale)
    # The kernels work in base 2: the product with log2(e) has to be a float32 as well.
    largest = float(np.finfo(np.float32).max) / math.log2(math.e)
    if not math.isfinite(scale) or abs(scale) > largest:
        raise ValueError(f"sm_scale must be finite, also as a float32; got {scale!r}")
    return scale


def _check_lengths(lengths: np.ndarray, topk: int) -> None:
    for row in np.flatnonzero((lengths < 0) | (lengths > topk))[:1]:
        raise ValueError(
            f"topk_length must lie between 0 and K = {topk}; got {lengths[row]} for token {row}"
        )
