"""Checks what a caller hands to DCP decode, before anything converts it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.arrays import (
    LARGEST_SCALE,
    dtype_name,
    is_traced,
    known_number,
    shape_of,
    shares_memory,
    to_jax,
)
from jax_impl.decode.plan import DecodePlan
from jax_impl.planning.kv_sharding import check_page_size

D_QK = 576
D_V = 512
PAGE_SIZES = (32, 64, 128)

_INPUT_DTYPES = ("bfloat16", "float8_e4m3fn")
_OUT_DTYPES = ("bfloat16", "float32")
# Smaller float32 are not normal: XLA takes them for 0.
_SMALLEST = float(np.finfo(np.float32).tiny)


class Arguments(NamedTuple):
    """The checked arguments as JAX arrays."""

    q: jax.Array  # [T, H, 576]
    kv_cache: jax.Array  # [pages, P, 576]
    block_table: jax.Array  # [B, max_pages] int32
    plan: DecodePlan
    sm_scale: float
    logit_scale: Any  # [] float32, |sm_scale| * q_scale * kv_scale
    kv_scale: Any  # [] float32
    out_dtype: Any
    shared: bool  # the memory of an array is another library's


def check(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    plan: Any,
    sm_scale: Any,
    *,
    kv_scale: Any,
    q_scale: Any,
    out_dtype: Any,
) -> Arguments:
    """Raises ValueError or NotImplementedError for what can't be served, else converts."""
    if not isinstance(plan, DecodePlan):
        raise ValueError(f"plan must be a DecodePlan of plan_decode; got {type(plan).__name__}")
    tokens, heads, width = shape_of(q, "q", "[T, H, 576]", _INPUT_DTYPES)
    pages, page_size, kv_width = shape_of(kv_cache, "kv_cache", "[pages, P, 576]", _INPUT_DTYPES)
    requests, max_pages = shape_of(block_table, "block_table", "[B, max_pages]", ("int32",))
    for name, got in (("q", width), ("kv_cache", kv_width)):
        if got != D_QK:
            raise NotImplementedError(f"{name} must have a width of {D_QK} (512 + 64); got {got}")
    if dtype_name(q.dtype) != "bfloat16" and dtype_name(kv_cache.dtype) == "bfloat16":
        raise NotImplementedError("q must be bfloat16 with a bfloat16 kv_cache; got float8_e4m3fn")
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"kv_cache must have pages of 32, 64 or 128; got {page_size}")
    check_page_size(page_size, plan.interleave)
    if heads != plan.heads:
        raise ValueError(f"q must have the {plan.heads} heads of its plan; got {heads}")
    if tokens < plan.num_rows:
        raise ValueError(f"q must have a row for each of the plan's {plan.num_rows}; got {tokens}")
    if requests != plan.num_requests:
        raise ValueError(
            f"block_table must have a row for each of the plan's {plan.num_requests} requests; "
            f"got {requests}"
        )
    if not is_traced(plan.row_keys):
        _check_table(block_table, plan, pages, page_size, max_pages)

    scale = known_number(sm_scale, "sm_scale")
    key_scale, query_scale = _tensor_scale(kv_scale, "kv_scale"), _tensor_scale(q_scale, "q_scale")
    out_dtype = "bfloat16" if out_dtype is None else dtype_name(out_dtype)
    if out_dtype not in _OUT_DTYPES:
        raise NotImplementedError(f"out_dtype must be bfloat16 or float32; got {out_dtype}")
    return Arguments(
        q=to_jax(q, "q"),
        kv_cache=to_jax(kv_cache, "kv_cache"),
        block_table=to_jax(block_table, "block_table"),
        plan=plan,
        sm_scale=scale,
        logit_scale=_logit_scale(scale, query_scale, key_scale),
        kv_scale=np.float32(key_scale) if isinstance(key_scale, float) else key_scale,
        out_dtype=jnp.dtype(out_dtype),
        shared=any(shares_memory(array) for array in (q, kv_cache, block_table)),
    )


def _check_table(
    block_table: Any, plan: DecodePlan, pages: int, page_size: int, max_pages: int
) -> None:
    """Every page that a row's keys lie on must be in the table, and in the cache."""
    keys, request = np.asarray(plan.row_keys), np.asarray(plan.row_request)
    held = np.zeros(max(plan.num_requests, 1), np.int64)
    np.maximum.at(held, request[keys > 0], keys[keys > 0])
    widest = int(held.argmax())
    if held[widest] > max_pages * page_size:
        raise ValueError(
            f"block_table must be wide enough for {held[widest]} keys of request {widest}, "
            f"{-(-held[widest] // page_size)} pages of {page_size}; got {max_pages}"
        )
    if is_traced(block_table) or not plan.num_requests:
        return
    table = np.asarray(block_table if isinstance(block_table, np.ndarray) else to_jax(block_table))
    used = np.arange(max_pages) * page_size < held[:, None]
    for row, column in np.argwhere(used & ((table < 0) | (table >= pages)))[:1]:
        raise ValueError(
            f"block_table must name pages of kv_cache, 0 to {pages - 1}, where a request has "
            f"keys; got {table[row, column]} for page {column} of request {row}"
        )


def _tensor_scale(scale: Any, name: str) -> float | jax.Array:
    """A per-tensor scale, None being 1: a number that a float32 holds, or what is traced."""
    if scale is None:
        return 1.0
    if hasattr(scale, "shape") and hasattr(scale, "dtype"):
        if math.prod(scale.shape) != 1 or dtype_name(scale.dtype) != "float32":
            raise ValueError(
                f"{name} must be a positive number or one float32; "
                f"got {dtype_name(scale.dtype)} {list(scale.shape)}"
            )
        array = to_jax(scale).reshape(())
        if is_traced(array):
            return array
        scale = float(array)
    number = known_number(scale, name)
    if not number > 0:
        raise ValueError(f"{name} must be positive; got {number!r}")
    if number < _SMALLEST:
        raise ValueError(
            f"{name} must be a positive float32, {_SMALLEST:.8g} at least, below which XLA takes a "
            f"number for 0; got {number!r}"
        )
    return float(np.float32(number))


def _logit_scale(sm_scale: float, q_scale: float | jax.Array, kv_scale: float | jax.Array) -> Any:
    """What the product of a stored query and key is multiplied by, the sign left out."""
    if isinstance(q_scale, jax.Array) or isinstance(kv_scale, jax.Array):
        return jnp.asarray(abs(sm_scale) * q_scale * kv_scale, jnp.float32)
    # In Python's doubles no partial product leaves the range.
    factors = {"sm_scale": sm_scale, "q_scale": q_scale, "kv_scale": kv_scale}
    product = math.prod(factors.values())
    if sm_scale and not _SMALLEST <= abs(product) <= LARGEST_SCALE:
        given = ", ".join(f"{name} {value:.8g}" for name, value in factors.items())
        raise ValueError(
            f"sm_scale * q_scale * kv_scale must be 0 or, as a float32, {_SMALLEST:.8g} to "
            f"{LARGEST_SCALE:.8g} in size; got {product:.8g} ({given})"
        )
    return np.float32(abs(product))
