"""Decode in plain jax.numpy: no Pallas, any platform, reads like the formula.

The precision recipe is the kernel's: products of bfloat16 (or exactly widened float8) numbers
summed in float32, softmax and its sum in float32, the weights rounded to bfloat16 for the
product with the values. Tokens go one at a time, heads 64 at a time and keys 512 at a time, so
the arithmetic of a (token, head) row is the same in every batch and under every plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.decode.arguments import D_V
from jax_impl.decode.result import DecodeResult

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32

HEAD_GROUP = 64
KEYS_AT_A_TIME = 512


@functools.partial(jax.jit, static_argnames=("out_dtype",))
def attend(
    q: Float[Array, "T H 576"],
    kv_cache: Float[Array, "pages P 576"],
    block_table: Int32[Array, "B max_pages"],
    row_request: Int32[Array, " T"],
    row_keys: Int32[Array, " T"],
    logit_scale: Float32[Array, ""],
    out_scale: Float32[Array, ""],
    *,
    out_dtype: Any,
) -> DecodeResult:
    """All rows. logit_scale >= 0; there is at least one page and one entry of the table."""
    num_heads = q.shape[1]
    q = jnp.pad(q, [(0, 0), (0, -num_heads % HEAD_GROUP), (0, 0)])

    def run(operand_dtype: jnp.dtype) -> DecodeResult:
        token = functools.partial(
            _attend_token, kv_cache, block_table, logit_scale, out_scale, operand_dtype
        )
        return lax.map(lambda row: token(*row), (q, row_request, row_keys))

    # A CPU has no bfloat16 multiplier: float32 operands give the same exact products, faster.
    result = lax.platform_dependent(
        cpu=lambda: run(jnp.dtype(jnp.float32)), default=lambda: run(jnp.dtype(jnp.bfloat16))
    )
    return DecodeResult(result.out[:, :num_heads].astype(out_dtype), result.lse[:, :num_heads])


def _attend_token(
    kv_cache: Float[Array, "pages P 576"],
    block_table: Int32[Array, "B max_pages"],
    logit_scale: Float32[Array, ""],
    out_scale: Float32[Array, ""],
    operand_dtype: jnp.dtype,
    q: Float[Array, "H 576"],
    request: Int32[Array, ""],
    num_keys: Int32[Array, ""],
) -> DecodeResult:
    pages, page_size, width = kv_cache.shape
    row = block_table[jnp.maximum(request, 0)]
    num_keys = jnp.minimum(num_keys, row.shape[0] * page_size)
    pages_at_a_time = KEYS_AT_A_TIME // page_size
    row = jnp.pad(row, (0, -row.shape[0] % pages_at_a_time))

    def keys_of(block: Array) -> tuple[Array, Array]:
        numbers = lax.dynamic_slice_in_dim(row, block * pages_at_a_time, pages_at_a_time)
        keys = kv_cache[jnp.clip(numbers, 0, pages - 1)].reshape(-1, width)
        # Behind the last key the cache, and the table, may hold anything.
        valid = block * KEYS_AT_A_TIME + jnp.arange(KEYS_AT_A_TIME) < num_keys
        return jnp.where(valid[:, None], keys.astype(operand_dtype), 0), valid

    attend = functools.partial(_attend_heads, keys_of, num_keys, logit_scale, out_scale)
    result = lax.map(attend, q.astype(operand_dtype).reshape(-1, HEAD_GROUP, width))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), result)


def _attend_heads(
    keys_of: Callable[[Array], tuple[Array, Array]],
    num_keys: Int32[Array, ""],
    logit_scale: Float32[Array, ""],
    out_scale: Float32[Array, ""],
    q: Float[Array, "H 576"],
) -> DecodeResult:
    """Softmax over blocks of keys: sums are relative to the largest logit so far."""
    dot = functools.partial(
        jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )

    def take(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weighted, reference, total = state
        keys, valid = keys_of(block)
        logits = jnp.where(valid, logit_scale * dot("hd,kd->hk", q, keys), -jnp.inf)
        moved = jnp.maximum(reference, logits.max(axis=1))
        factor = jnp.exp(reference - moved)
        weights = jnp.exp(logits - moved[:, None])
        rounded = weights.astype(jnp.bfloat16).astype(keys.dtype)
        weighted = weighted * factor[:, None] + dot("hk,kv->hv", rounded, keys[:, :D_V])
        return weighted, moved, total * factor + weights.sum(axis=1)

    rows = q.shape[0]
    start = (jnp.zeros((rows, D_V)), jnp.full((rows,), -jnp.inf), jnp.zeros((rows,)))
    blocks = -(-num_keys // KEYS_AT_A_TIME)
    weighted, reference, total = lax.fori_loop(0, blocks, take, start)
    empty = num_keys <= 0
    return DecodeResult(
        out=jnp.where(empty, 0.0, weighted / total[:, None] * out_scale),
        lse=jnp.where(empty, -jnp.inf, reference + jnp.log(total)),
    )
