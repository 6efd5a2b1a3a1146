"""Sparse prefill in plain jax.numpy: no Pallas, any platform, reads like the formula.

The precision recipe is the kernel's: bfloat16 products summed in float32, softmax and its sum
in float32, the weights rounded to bfloat16 for the product with the values.

Tokens are worked through in blocks, so that the rows gathered for them stay within a fixed
number of bytes. The block's size depends on K and D alone, never on T, the last block is filled
up, and heads go through the matrix products 64 at a time: the arithmetic of a (token, head) row
is then the same in every call, and a batch cut into pieces gives the same bits as one call.

On a CPU, outside jit, NumPy reads a token's keys, and attending with 64 heads is a program of its
own, which batches of all sizes have in common: compiling one for a batch takes longer than running
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.arrays import namespace, on_host, to_jax_beside
from jax_impl.prefill.sparse.arguments import D_V
from jax_impl.prefill.sparse.paged_rows import read_rows
from jax_impl.prefill.sparse.result import SparsePrefillResult
from jax_impl.prefill.sparse.validity import key_is_valid

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int32

    from jax_impl.kv_cache import PagedKV

GATHER_BYTES = 128 * 2**20
MAX_BLOCK = 64
HEAD_GROUP = 64


def attend(
    q: BFloat16[Array, "T H D"],
    kv: BFloat16[Array, "S D"],
    indices: Int32[Array, "T K"],
    scale: Float32[Array, ""],
    sink: Float32[Array, " H"],
    length: Int32[Array, " T"],
    *,
    num_kv: int,
) -> SparsePrefillResult:
    """All tokens. scale >= 0; kv has at least one row, of which the first num_kv count."""
    run = _attend_in_steps if on_host(q, kv, indices, sink, length) else _attend
    return run(q, kv, indices, scale, sink, length, num_rows=(num_kv,))


def attend_pages(
    q: BFloat16[Array, "T H 512"],
    caches: tuple[PagedKV, ...],
    slots: Int32[Array, "T K"],
    scale: Float32[Array, ""],
    sink: Float32[Array, " H"],
    length: Int32[Array, " T"],
    *,
    num_slots: tuple[int, ...],
) -> SparsePrefillResult:
    """The same with the keys in pages. Each cache has a page; its first num_slots[i] count."""
    in_steps = on_host(q, *(paged.cache for paged in caches), slots, sink, length)
    run = _attend_in_steps if in_steps else _attend
    return run(q, caches, slots, scale, sink, length, num_rows=num_slots)


def _read(held: Any, num_rows: tuple[int, ...], rows: Int32[Array, " K"]) -> BFloat16[Array, "K D"]:
    """Rows that exist: of kv, or of caches with num_rows slots."""
    return read_rows(held, num_rows, rows) if isinstance(held, tuple) else held[rows]


def _attend_in_steps(
    q: jax.Array,
    held: Any,
    indices: jax.Array,
    scale: Any,
    sink: Any,
    length: Any,
    *,
    num_rows: tuple[int, ...],
) -> SparsePrefillResult:
    tokens, heads, width = q.shape
    groups = -(-heads // HEAD_GROUP)
    queries = np.zeros((tokens, groups * HEAD_GROUP, width), q.dtype)
    queries[:, :heads] = q
    queries = queries.reshape(tokens, groups, HEAD_GROUP, width)
    sinks = np.pad(sink, (0, groups * HEAD_GROUP - heads)).reshape(groups, HEAD_GROUP)
    held, lists, lengths = jax.tree.map(np.asarray, (held, indices, length))
    read = functools.partial(_read, held, num_rows)
    rows = (tokens, groups, HEAD_GROUP)
    result = SparsePrefillResult(
        np.empty((*rows, D_V), q.dtype), np.empty(rows, np.float32), np.empty(rows, np.float32)
    )
    for token in range(tokens):
        keys, valid = _valid_keys(
            lists[token], lengths[token], read, sum(num_rows), np.dtype(np.float32)
        )
        for group in range(groups):
            found = _attend_heads(queries[token, group], sinks[group], keys, valid, scale)
            for whole, part in zip(result, found, strict=True):
                whole[token, group] = part
    return jax.tree.map(
        lambda x: to_jax_beside(x.reshape(tokens, -1, *x.shape[3:])[:, :heads], q), result
    )


@functools.partial(jax.jit, static_argnames=("num_rows",))
def _attend(
    q: BFloat16[Array, "T H D"],
    held: Any,
    indices: Int32[Array, "T K"],
    scale: Float32[Array, ""],
    sink: Float32[Array, " H"],
    length: Int32[Array, " T"],
    *,
    num_rows: tuple[int, ...],
) -> SparsePrefillResult:
    num_heads = q.shape[1]
    missing = -num_heads % HEAD_GROUP
    q = jnp.pad(q, [(0, 0), (0, missing), (0, 0)])
    sink = jnp.pad(sink, [(0, missing)])

    def run(operand_dtype: jnp.dtype, block: int) -> SparsePrefillResult:
        token = functools.partial(
            _attend_token,
            read=functools.partial(_read, held, num_rows),
            scale=scale,
            sink=sink,
            num_kv=sum(num_rows),
            operand_dtype=operand_dtype,
        )
        return _in_blocks(token, block, q, indices, length)

    # A CPU has no bfloat16 multiplier: float32 operands give the same exact products, faster,
    # and a batch of tokens gains nothing there.
    result = lax.platform_dependent(
        cpu=lambda: run(jnp.float32, 1),
        default=lambda: run(jnp.bfloat16, _block_size(indices.shape[1], q.shape[2])),
    )
    return jax.tree.map(lambda x: x[:, :num_heads], result)


def _attend_token(
    q: BFloat16[Array, "H D"],
    indices: Int32[Array, " K"],
    length: Int32[Array, ""],
    *,
    read: Callable[[Int32[Array, " K"]], BFloat16[Array, "K D"]],
    scale: Float32[Array, ""],
    sink: Float32[Array, " H"],
    num_kv: int,
    operand_dtype: jnp.dtype,
) -> SparsePrefillResult:
    keys, valid = _valid_keys(indices, length, read, num_kv, operand_dtype)
    groups = (-1, HEAD_GROUP)
    result = lax.map(
        lambda group: _attend_heads(group[0], group[1], keys, valid, scale),
        (q.reshape(*groups, q.shape[1]), sink.reshape(groups)),
    )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), result)


def _valid_keys(
    indices: Int32[Array, " K"],
    length: Int32[Array, ""],
    read: Callable[[Int32[Array, " K"]], BFloat16[Array, "K D"]],
    num_kv: int,
    operand_dtype: Any,
) -> tuple[Float[Array, "K D"], Bool[Array, " K"]]:
    """The keys of a list, 0 in its holes, and which are none."""
    xp = namespace(indices)
    valid = key_is_valid(indices, xp.arange(indices.shape[0]), num_kv, length)
    # A hole reads row 0 and discards it, so that no unreferenced NaN can come through.
    keys = read(xp.where(valid, indices, 0)).astype(operand_dtype)
    return xp.where(valid[:, None], keys, xp.zeros((), operand_dtype)), valid


@jax.jit
def _attend_heads(
    q: BFloat16[Array, "H D"],
    sink: Float32[Array, " H"],
    keys: Float[Array, "K D"],
    valid: Bool[Array, " K"],
    scale: Float32[Array, ""],
) -> SparsePrefillResult:
    dot = functools.partial(
        jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    logits = scale * dot("hd,kd->hk", q.astype(keys.dtype), keys)
    logits = jnp.where(valid, logits, -jnp.inf)
    maximum = logits.max(axis=1)
    # exp(-inf - -inf) is NaN: an empty row, which is overwritten below, must not make one.
    empty = ~valid.any()
    reference = jnp.where(empty, 0.0, maximum)
    weights = jnp.exp(logits - reference[:, None])
    total = weights.sum(axis=1)
    rounded = weights.astype(jnp.bfloat16).astype(keys.dtype)
    weighted = dot("hk,kv->hv", rounded, keys[:, :D_V])

    out = weighted / (total + jnp.exp(sink - reference))[:, None]
    return SparsePrefillResult(
        out=jnp.where(empty, 0.0, out).astype(jnp.bfloat16),
        max_logits=jnp.where(empty, -jnp.inf, maximum),
        lse=jnp.where(empty, jnp.inf, reference + jnp.log(total)),
    )


def _block_size(topk: int, d_qk: int) -> int:
    return max(1, min(MAX_BLOCK, GATHER_BYTES // (topk * d_qk * 2)))


def _in_blocks(token, block: int, *arrays: jax.Array) -> SparsePrefillResult:
    """token() over the leading axis of the arrays, `block` entries at a time."""
    if block == 1:
        return lax.map(lambda row: token(*row), arrays)
    num_tokens = arrays[0].shape[0]
    num_blocks = -(-num_tokens // block)

    def blocked(array: jax.Array) -> jax.Array:
        missing = num_blocks * block - num_tokens
        array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
        return array.reshape(num_blocks, block, *array.shape[1:])

    result = lax.map(lambda rows: jax.vmap(token)(*rows), tuple(map(blocked, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], result)
