"""Decode in plain jax.numpy: no Pallas, any platform, reads like the formula.

The precision recipe is the kernel's: products of bfloat16 (or exactly widened float8) numbers
summed in float32, softmax and its sum in float32, the weights rounded to bfloat16 for the
product with the values. Tokens go one at a time, heads 64 at a time and keys 512 at a time, so
the arithmetic of a (token, head) row is the same in every batch and under every plan.

On a CPU, outside jit, NumPy reads keys, and each of the other steps is a program of its own, which
batches of all sizes have in common: compiling one for a batch takes longer than running it.
Elsewhere all steps are one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.arrays import namespace, on_host, to_jax_beside
from jax_impl.decode.arguments import D_V
from jax_impl.decode.result import DecodeResult

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int32

HEAD_GROUP = 64
KEYS_AT_A_TIME = 512


def attend(
    q: Float[Array, "T H 576"],
    kv_cache: Float[Array, "pages P 576"],
    block_table: Int32[Array, "B max_pages"],
    row_request: Int32[Any, " T"],
    row_keys: Int32[Any, " T"],
    logit_scale: Float32[Any, ""],
    out_scale: Float32[Any, ""],
    *,
    out_dtype: Any,
) -> DecodeResult:
    """All rows. logit_scale >= 0; there is at least one page and one entry of the table."""
    arrays = (q, kv_cache, block_table, row_request, row_keys, logit_scale, out_scale)
    run = _attend_in_steps if on_host(*arrays) else _attend
    return run(*arrays, out_dtype=out_dtype)


def _attend_in_steps(
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: Any,
    row_request: Any,
    row_keys: Any,
    logit_scale: Any,
    out_scale: Any,
    *,
    out_dtype: Any,
) -> DecodeResult:
    tokens, heads, width = q.shape
    page_size = kv_cache.shape[1]
    pages_at_a_time = KEYS_AT_A_TIME // page_size
    groups = -(-heads // HEAD_GROUP)
    queries = np.zeros((tokens, groups * HEAD_GROUP, width), q.dtype)
    queries[:, :heads] = q
    queries = queries.reshape(tokens, groups, HEAD_GROUP, width)
    out = np.empty((tokens, groups, HEAD_GROUP, D_V), out_dtype)
    lse = np.empty((tokens, groups, HEAD_GROUP), np.float32)

    table, cache = np.asarray(block_table), np.asarray(kv_cache)
    held = np.minimum(row_keys, table.shape[1] * page_size)
    table = np.pad(table, [(0, 0), (0, -table.shape[1] % pages_at_a_time)])
    for token, num_keys in enumerate(held):
        numbers = table[max(row_request[token], 0)].reshape(-1, pages_at_a_time)
        states = [_nothing_taken()] * groups
        for block in range(-(-num_keys // KEYS_AT_A_TIME)):
            left = np.int32(num_keys - block * KEYS_AT_A_TIME)
            keys, valid = _keys_of(cache, numbers[block], left, np.float32)
            states = [
                _take(part, keys, valid, logit_scale, state)
                for part, state in zip(queries[token], states, strict=True)
            ]
        for group, state in enumerate(states):
            found = _finished(state, num_keys, out_scale, out_dtype)
            out[token, group], lse[token, group] = found
    return DecodeResult(
        to_jax_beside(out.reshape(tokens, -1, D_V)[:, :heads], q),
        to_jax_beside(lse.reshape(tokens, -1)[:, :heads], q),
    )


@functools.partial(jax.jit, static_argnames=("out_dtype",))
def _attend(
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
    num_heads = q.shape[1]
    q = jnp.pad(q, [(0, 0), (0, -num_heads % HEAD_GROUP), (0, 0)])

    def run(operand_dtype: Any) -> DecodeResult:
        token = functools.partial(
            _attend_token, kv_cache, block_table, logit_scale, out_scale, operand_dtype, out_dtype
        )
        return lax.map(lambda row: token(*row), (q, row_request, row_keys))

    # A CPU has no bfloat16 multiplier: float32 operands give the same exact products, faster.
    result = lax.platform_dependent(cpu=lambda: run(jnp.float32), default=lambda: run(jnp.bfloat16))
    return DecodeResult(result.out[:, :num_heads], result.lse[:, :num_heads])


def _attend_token(
    kv_cache: Float[Array, "pages P 576"],
    block_table: Int32[Array, "B max_pages"],
    logit_scale: Float32[Array, ""],
    out_scale: Float32[Array, ""],
    operand_dtype: Any,
    out_dtype: Any,
    q: Float[Array, "H 576"],
    request: Int32[Array, ""],
    num_keys: Int32[Array, ""],
) -> DecodeResult:
    _, page_size, width = kv_cache.shape
    row = block_table[jnp.maximum(request, 0)]
    num_keys = jnp.minimum(num_keys, row.shape[0] * page_size)
    pages_at_a_time = KEYS_AT_A_TIME // page_size
    row = jnp.pad(row, (0, -row.shape[0] % pages_at_a_time))

    def attend(q: Float[Array, "G 576"]) -> DecodeResult:
        def take(block: Array, state: _State) -> _State:
            numbers = lax.dynamic_slice_in_dim(row, block * pages_at_a_time, pages_at_a_time)
            left = num_keys - block * KEYS_AT_A_TIME
            return _take(q, *_keys_of(kv_cache, numbers, left, operand_dtype), logit_scale, state)

        blocks = -(-num_keys // KEYS_AT_A_TIME)
        state = lax.fori_loop(0, blocks, take, jax.tree.map(jnp.asarray, _nothing_taken()))
        return _finished(state, num_keys, out_scale, out_dtype)

    result = lax.map(attend, q.reshape(-1, HEAD_GROUP, width))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), result)


class _State(NamedTuple):
    """Softmax over the keys so far of 64 heads: sums are relative to the largest logit."""

    weighted: Float32[Any, "G 512"]
    reference: Float32[Any, " G"]
    total: Float32[Any, " G"]


def _nothing_taken() -> _State:
    rows = (HEAD_GROUP,)
    return _State(
        np.zeros((*rows, D_V), np.float32),
        np.full(rows, -np.inf, np.float32),
        np.zeros(rows, np.float32),
    )


def _keys_of(
    kv_cache: Float[Array, "pages P 576"],
    numbers: Int32[Array, " pages_at_a_time"],
    left: Int32[Array, ""],
    operand_dtype: Any,
) -> tuple[Float[Array, "K 576"], Bool[Array, " K"]]:
    """The keys of some pages, of which the first `left` count, and which these are."""
    xp = namespace(numbers)
    pages, _, width = kv_cache.shape
    keys = kv_cache[xp.clip(numbers, 0, pages - 1)].reshape(-1, width).astype(operand_dtype)
    # Behind the last key the cache, and the table, may hold anything.
    valid = xp.arange(KEYS_AT_A_TIME) < left
    return xp.where(valid[:, None], keys, xp.zeros((), operand_dtype)), valid


@jax.jit
def _take(
    q: Float[Array, "G 576"],
    keys: Float[Array, "K 576"],
    valid: Bool[Array, " K"],
    logit_scale: Float32[Array, ""],
    state: _State,
) -> _State:
    dot = functools.partial(
        jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    weighted, reference, total = state
    logits = logit_scale * dot("hd,kd->hk", q.astype(keys.dtype), keys)
    logits = jnp.where(valid, logits, -jnp.inf)
    moved = jnp.maximum(reference, logits.max(axis=1))
    factor = jnp.exp(reference - moved)
    weights = jnp.exp(logits - moved[:, None])
    rounded = weights.astype(jnp.bfloat16).astype(keys.dtype)
    weighted = weighted * factor[:, None] + dot("hk,kv->hv", rounded, keys[:, :D_V])
    return _State(weighted, moved, total * factor + weights.sum(axis=1))


@functools.partial(jax.jit, static_argnums=3)
def _finished(
    state: _State, num_keys: Int32[Array, ""], out_scale: Float32[Array, ""], out_dtype: Any
) -> DecodeResult:
    empty = num_keys <= 0
    out = jnp.where(empty, 0.0, state.weighted / state.total[:, None] * out_scale)
    lse = jnp.where(empty, -jnp.inf, state.reference + jnp.log(state.total))
    return DecodeResult(out.astype(out_dtype), lse)
