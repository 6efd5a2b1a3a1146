"""Checks what a caller hands to sparse prefill, before anything converts it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_impl.arrays import is_traced, known_number, shape_of, shares_memory, to_jax, true_or_false

D_QK = (512, 576)
D_V = 512
MAX_HEADS = 128

_BFLOAT16 = ("bfloat16",)
_FLOAT32 = ("float32",)
_INT32 = ("int32",)


class Arguments(NamedTuple):
    """The checked arguments as JAX arrays, without the axis of the single KV head."""

    q: jax.Array  # [T, H, D] bfloat16
    kv: jax.Array  # [S, D] bfloat16
    indices: jax.Array  # [T, K] int32
    sm_scale: float
    attn_sink: jax.Array | None  # [H] float32
    topk_length: jax.Array | None  # [T] int32
    shared: bool  # some lie in memory that the caller can still write to


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
    true_or_false(validate, "validate")
    queries = check_queries(q, D_QK)
    num_tokens, _, d_qk = queries
    if not isinstance(d_v, (int, np.integer)) or d_v != D_V:
        raise NotImplementedError(f"d_v must be {D_V}; got {d_v!r}")
    kv_shape = shape_of(kv, "kv", "[S, D] or [S, 1, D]", _BFLOAT16)
    if kv_shape[-1] != d_qk:
        raise ValueError(f"kv must be as wide as q, D = {d_qk}; got {kv_shape[-1]}")
    topk = check_list(indices, "indices", "[T, K] or [T, 1, K]", num_tokens)
    check_sink_and_length(attn_sink, topk_length, queries)
    scale = known_number(sm_scale, "sm_scale")

    checked = Arguments(
        q=to_jax(q, "q"),
        kv=to_jax(kv, "kv").reshape(kv_shape[0], d_qk),
        indices=to_jax(indices, "indices").reshape(num_tokens, topk),
        sm_scale=scale,
        attn_sink=None if attn_sink is None else to_jax(attn_sink, "attn_sink"),
        topk_length=None if topk_length is None else to_jax(topk_length, "topk_length"),
        shared=any(
            shares_memory(array)
            for array in (q, kv, indices, attn_sink, topk_length)
            if array is not None
        ),
    )
    if validate:
        check_known_lengths(checked.topk_length, topk)
    return checked


def check_queries(q: Any, widths: tuple[int, ...]) -> tuple[int, int, int]:
    """Tokens, heads and width of q."""
    num_tokens, num_heads, d_qk = shape_of(q, "q", "[T, H, D]", _BFLOAT16)
    if not 1 <= num_heads <= MAX_HEADS:
        raise NotImplementedError(f"q must have 1 to {MAX_HEADS} heads; got {num_heads}")
    if d_qk not in widths:
        accepted = " or ".join(map(str, widths))
        raise NotImplementedError(f"q must have a width D of {accepted}; got {d_qk}")
    return num_tokens, num_heads, d_qk


def check_list(indices: Any, name: str, axes: str, num_tokens: int) -> int:
    """The width of a list of keys for each token."""
    shape = shape_of(indices, name, axes, _INT32)
    if shape[0] != num_tokens:
        raise ValueError(
            f"{name} must have a row for each of the {num_tokens} tokens of q; got {shape[0]}"
        )
    if shape[-1] < 1:
        raise ValueError(f"{name} must have at least one slot a row; got K = 0")
    return shape[-1]


def check_sink_and_length(attn_sink: Any, topk_length: Any, queries: tuple[int, int, int]) -> None:
    num_tokens, num_heads, _ = queries
    if attn_sink is not None:
        (sink_heads,) = shape_of(attn_sink, "attn_sink", "[H]", _FLOAT32)
        if sink_heads != num_heads:
            raise ValueError(
                f"attn_sink must have a value for each of the {num_heads} heads of q; "
                f"got {sink_heads}"
            )
    if topk_length is not None:
        (length_rows,) = shape_of(topk_length, "topk_length", "[T]", _INT32)
        if length_rows != num_tokens:
            raise ValueError(
                f"topk_length must have a value for each of the {num_tokens} tokens of q; "
                f"got {length_rows}"
            )


def check_known_lengths(topk_length: jax.Array | None, topk: int) -> None:
    """Outside jit, where values can be seen."""
    if topk_length is not None and not is_traced(topk_length):
        _check_lengths(np.asarray(topk_length), topk)


def _check_lengths(lengths: np.ndarray, topk: int) -> None:
    for row in np.flatnonzero((lengths < 0) | (lengths > topk))[:1]:
        raise ValueError(
            f"topk_length must lie between 0 and K = {topk}; got {lengths[row]} for token {row}"
        )
