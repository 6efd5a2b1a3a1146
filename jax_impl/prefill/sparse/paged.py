"""Sparse prefill that reads pages of float8 tokens itself, without a workspace of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl import backends
from jax_impl.arrays import (
    is_traced,
    known_number,
    namespace,
    shares_memory,
    to_jax,
    true_or_false,
)
from jax_impl.kv_cache import FORMATS, PagedKV
from jax_impl.prefill.sparse import kernel_sm90, xla
from jax_impl.prefill.sparse.api import INTERPRETED_CTAS, base2, sink_and_length, with_scale_from_0
from jax_impl.prefill.sparse.arguments import (
    D_V,
    check_known_lengths,
    check_list,
    check_queries,
    check_sink_and_length,
)
from jax_impl.prefill.sparse.batch import BatchRows
from jax_impl.prefill.sparse.result import SparsePrefillResult, result_of_no_tokens

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float32, Int32

FORMAT = FORMATS["v4-fp8"]
MAX_CACHES = 2
_INT32_MAX = 2**31 - 1


def sparse_prefill_paged(
    q: BFloat16[Any, "T H 512"],
    caches: Sequence[PagedKV],
    slots: Int32[Any, "T K"],
    sm_scale: float,
    *,
    topk_length: Int32[Any, " T"] | None = None,
    attn_sink: Float32[Any, " H"] | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> SparsePrefillResult:
    """Attention of each query token over the tokens of paged caches that its list of slots names.

    The same as reading these tokens (jax_impl.kv_cache.read_kv) into rows of a bfloat16 matrix
    and calling jax_impl.sparse_prefill with the rows' numbers, bit for bit on the same backend:
    the same order of keys, in the same blocks, and dequantising is exact.

    Args:
      q: [T, H, 512] bfloat16 queries, H from 1 to 128.
      caches: one or two PagedKV of format "v4-fp8", with any page sizes. Their slots are
        numbered one after another: slot s of the second cache is caches[0].num_slots + s.
      slots: [T, K] int32, any K >= 1. A negative entry, or one past the last slot of the last
        cache, is a hole wherever it stands; an entry that occurs twice counts twice.
      sm_scale, topk_length, attn_sink, validate: as in jax_impl.sparse_prefill.
      backend: "auto" is the Pallas kernel on a Hopper GPU and "xla" anywhere else. "pallas-
        interpret" runs the kernel's own body under Pallas' GPU interpreter, on the CPU.

    Returns:
      SparsePrefillResult(out [T, H, 512] bfloat16, max_logits [T, H], lse [T, H] float32), with
      the special values of jax_impl.sparse_prefill. A NaN code, or a NaN scale (UE8M0 byte 255),
      in a token that is attended to makes NaN of its (token, head) rows; tokens that no valid
      slot names are never looked at.

    Raises:
      ValueError: an argument of the wrong type, dtype or rank, arguments that don't fit
        together, caches with more than 2^31 - 1 slots together, a length outside [0, K], or a
        scale that is not finite.
      NotImplementedError: more than 128 heads, another width than 512, another format, or a
        backend that this machine can't run.
    """
    true_or_false(validate, "validate")
    queries = check_queries(q, (D_V,))
    num_tokens, num_heads, _ = queries
    _check_caches(caches)
    topk = check_list(slots, "slots", "[T, K]", num_tokens)
    check_sink_and_length(attn_sink, topk_length, queries)
    scale = known_number(sm_scale, "sm_scale")
    given = [array for array in (q, slots, attn_sink, topk_length) if array is not None]
    shared = any(map(shares_memory, given))
    length = None if topk_length is None else to_jax(topk_length, "topk_length")
    if validate:
        check_known_lengths(length, topk)
    backend = backends.resolve(backend)
    if num_tokens == 0:
        return result_of_no_tokens(num_heads, D_V)

    operands = _operands(
        caches, to_jax(slots, "slots"),
        None if attn_sink is None else to_jax(attn_sink, "attn_sink"), length, num_heads,
    )  # fmt: skip
    queries, scale = with_scale_from_0(to_jax(q, "q"), scale)
    result = _attend(backend, queries, operands, scale, num_slots=_num_slots(caches))
    if shared and not is_traced(*result):
        jax.block_until_ready(result)
    return result


def sparse_prefill_paged_into(
    batch: BatchRows,
    caches: Sequence[PagedKV],
    slots: Int32[Array, "t K"],
    sm_scale: float,
    *,
    attn_sink: Float32[Array, " H"] | None,
    topk_length: Int32[Array, " t"],
    backend: str,
) -> None:
    """sparse_prefill_paged of t tokens of a batch: what `sparse_prefill_into` is for kv rows."""
    operands = _operands(caches, slots, attn_sink, topk_length, batch.q.shape[1])
    num_slots = _num_slots(caches)
    if backend != "xla" and sm_scale >= 0:
        kernel_sm90.attend_pages_into(
            batch, *operands.in_order(sm_scale), pages=operands.pages(num_slots),
            **_launch_settings(backend),
        )  # fmt: skip
        return
    queries, scale = with_scale_from_0(batch.queries(slots.shape[0]), sm_scale)
    batch.write(_attend(backend, queries, operands, scale, num_slots=num_slots))


class _Operands(NamedTuple):
    caches: tuple[PagedKV, ...]
    slots: jax.Array
    sink: jax.Array
    length: jax.Array

    def in_order(self, scale: float) -> tuple[Any, ...]:
        """As the kernel's entry takes them, behind q."""
        arrays = tuple(paged.cache for paged in self.caches)
        return arrays, self.slots, base2(scale), self.sink, self.length

    def pages(self, num_slots: tuple[int, ...]) -> tuple[kernel_sm90.Pages, ...]:
        return tuple(
            kernel_sm90.Pages(num_slots=count, page_size=paged.page_size)
            for paged, count in zip(self.caches, num_slots, strict=True)
        )


def _operands(
    caches: Sequence[PagedKV],
    slots: jax.Array,
    sink: jax.Array | None,
    length: jax.Array | None,
    num_heads: int,
) -> _Operands:
    both = sink_and_length(sink, length, slots, num_heads)
    return _Operands(tuple(map(_with_a_page, caches)), slots, *both)


def _num_slots(caches: Sequence[PagedKV]) -> tuple[int, ...]:
    return tuple(paged.num_slots for paged in caches)


def _check_caches(caches: Any) -> None:
    if not isinstance(caches, (tuple, list)) or not 1 <= len(caches) <= MAX_CACHES:
        is_list = isinstance(caches, (tuple, list))
        got = f"{len(caches)} of them" if is_list else f"a {type(caches).__name__}"
        raise ValueError(f"caches must be a tuple of 1 or {MAX_CACHES} PagedKV; got {got}")
    for paged in caches:
        if not isinstance(paged, PagedKV):
            raise ValueError(f"caches must hold PagedKV; got {type(paged).__name__}")
        if paged.kv_format != FORMAT.name:
            raise NotImplementedError(f"caches must be {FORMAT.name}; got {paged.kv_format}")
    slots = sum(paged.num_slots for paged in caches)
    if slots > _INT32_MAX:
        raise ValueError(
            f"caches must have at most 2^31 - 1 slots together, which are int32; got {slots}"
        )


def _with_a_page(paged: PagedKV) -> PagedKV:
    """A read from an array without pages is an error even where every slot is a hole."""
    if paged.num_pages:
        return paged
    cache = namespace(paged.cache).zeros(FORMAT.cache_shape(1, paged.page_size), jnp.uint8)
    return jax.tree.map(lambda _: cache, paged)


def _attend(
    backend: str, q: jax.Array, operands: _Operands, scale: float, *, num_slots: tuple[int, ...]
) -> SparsePrefillResult:
    """scale >= 0; num_slots: of each cache as it was given."""
    if backend == "pallas-interpret" and not is_traced(*jax.tree.leaves((q, operands))):
        q, operands = jax.device_put((q, operands), jax.local_devices(backend="cpu")[0])
    if backend == "xla":
        caches, slots, sink, length = operands
        return xla.attend_pages(
            q, caches, slots, np.float32(scale), sink, length, num_slots=num_slots
        )
    return kernel_sm90.attend_pages(
        q, *operands.in_order(scale), pages=operands.pages(num_slots), **_launch_settings(backend)
    )


def _launch_settings(backend: str) -> dict[str, Any]:
    """How the kernel is run on a backend that isn't "xla"."""
    if backend == "pallas":
        return {"config": kernel_sm90.PagedConfig.for_device(jax.devices()[0])}
    config = kernel_sm90.PagedConfig(num_ctas=INTERPRETED_CTAS, part_tiles=4, early_tiles=4)
    return {"config": config, "interpret": plgpu.InterpretGPUParams()}
