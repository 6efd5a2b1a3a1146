"""Pads a problem to what the kernel's tiles want, launches it, and strips the padding.

A launch writes into a result that is there already (`BatchRows`), so that one chunk of a batch
needs neither a copy of its queries nor one of its results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic.blocks import D_V, PAIR_KEYS
from jax_impl.mosaic.scratch import check_smem
from jax_impl.prefill.sparse.batch import BatchRows
from jax_impl.prefill.sparse.kernel_sm90 import (
    consumers,
    paged_producer,
    producer,
    seams_cuda,
    seams_interpret,
)
from jax_impl.prefill.sparse.kernel_sm90.config import Config, PagedConfig
from jax_impl.prefill.sparse.kernel_sm90.kernel import (
    CTA_AXIS,
    ROLE_AXIS,
    Gmem,
    Roles,
    scratch_types,
    sparse_prefill_body,
)
from jax_impl.prefill.sparse.kernel_sm90.problem import TILE_HEADS, Pages, Problem
from jax_impl.prefill.sparse.result import SparsePrefillResult

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float32, Int32, UInt8

# No sum crosses a warp, so Pallas needs no memory for it; what it would reserve is the
# difference between fitting and not for D = 576.
_REDUCTION_BYTES = 0


def attend(
    q: BFloat16[Array, "T H D"],
    kv: BFloat16[Array, "S D"],
    indices: Int32[Array, "T K"],
    base2_scale: Float32[Array, " 1"],
    sink: Float32[Array, " H"],
    length: Int32[Array, " T"],
    *,
    num_kv: int,
    config: Config | None = None,
    interpret: Any = None,
) -> SparsePrefillResult:
    """One launch, T >= 1. kv has at least one row, of which the first num_kv count.

    base2_scale: log2(e) times the non-negative softmax scale; an operand, so that another
    scale runs the same program. sink and length are always there, for the same reason: -inf
    is no sink, and K (or more) no length. config: tuning; None for the defaults.
    interpret: plgpu.InterpretGPUParams, or None for the GPU.

    Padding happens outside of the compiled program, so that all head counts up to 64, and all
    widths up to the same multiple of 128, share one.
    """
    lists = Lists(indices, length, sink, base2_scale)
    return _padded(
        q, (kv,), lists, num_kv=num_kv, pages=(), config=config or Config(), interpret=interpret
    )


def attend_into(
    batch: BatchRows,
    kv: BFloat16[Array, "S D"],
    indices: Int32[Array, "t K"],
    base2_scale: Float32[Array, " 1"],
    sink: Float32[Array, " H"],
    length: Int32[Array, " t"],
    *,
    num_kv: int,
    config: Config | None = None,
    interpret: Any = None,
) -> None:
    """As attend, for t tokens of a batch. Padded heads cost a copy of their rows."""
    lists = Lists(indices, length, sink, base2_scale)
    _into(
        batch, (kv,), lists, num_kv=num_kv, pages=(), config=config or Config(), interpret=interpret
    )


def attend_pages(
    q: BFloat16[Array, "T H 512"],
    caches: Sequence[UInt8[Array, "num_pages page_stride"]],
    slots: Int32[Array, "T K"],
    base2_scale: Float32[Array, " 1"],
    sink: Float32[Array, " H"],
    length: Int32[Array, " T"],
    *,
    pages: tuple[Pages, ...],
    config: PagedConfig | None = None,
    interpret: Any = None,
) -> SparsePrefillResult:
    """As attend, with the keys in one or two paged caches, which `pages` describes.

    Each cache has at least one page; of its slots the first pages[i].num_slots count.
    """
    lists = Lists(slots, length, sink, base2_scale)
    return _padded(
        q, tuple(caches), lists, num_kv=_num_slots(pages), pages=pages,
        config=config or PagedConfig(), interpret=interpret,
    )  # fmt: skip


def attend_pages_into(
    batch: BatchRows,
    caches: Sequence[UInt8[Array, "num_pages page_stride"]],
    slots: Int32[Array, "t K"],
    base2_scale: Float32[Array, " 1"],
    sink: Float32[Array, " H"],
    length: Int32[Array, " t"],
    *,
    pages: tuple[Pages, ...],
    config: PagedConfig | None = None,
    interpret: Any = None,
) -> None:
    """As attend_pages, for t tokens of a batch. Padded heads cost a copy of their rows."""
    lists = Lists(slots, length, sink, base2_scale)
    _into(
        batch, tuple(caches), lists, num_kv=_num_slots(pages), pages=pages,
        config=config or PagedConfig(), interpret=interpret,
    )  # fmt: skip


class Lists(NamedTuple):
    """What a launch has beside queries, keys and results."""

    indices: jax.Array
    length: jax.Array
    sink: jax.Array
    base2_scale: jax.Array

    def padded(self) -> Lists:
        return self._replace(
            indices=_pad(self.indices, axis=1, multiple=PAIR_KEYS, value=-1),
            sink=_pad(self.sink, axis=0, multiple=TILE_HEADS, value=-jnp.inf),
        )


def _num_slots(pages: tuple[Pages, ...]) -> int:
    return sum(cache.num_slots for cache in pages)


def _padded(
    q: jax.Array, kv: tuple[jax.Array, ...], lists: Lists, **static: Any
) -> SparsePrefillResult:
    num_heads = q.shape[1]
    q = _pad(q, axis=1, multiple=TILE_HEADS, value=0)
    result = _launch(q, kv, lists.padded(), **static)
    if q.shape[1] == num_heads:
        return result
    return SparsePrefillResult(*(array[:, :num_heads] for array in result))


def _into(batch: BatchRows, kv: tuple[jax.Array, ...], lists: Lists, **static: Any) -> None:
    if batch.q.shape[1] % TILE_HEADS:
        batch.write(_padded(batch.queries(lists.indices.shape[0]), kv, lists, **static))
    else:
        _launch_into(batch, kv, lists.padded(), **static)


@functools.partial(jax.jit, static_argnames=("num_kv", "pages", "config", "interpret"))
def _launch(
    q: jax.Array, kv: tuple[jax.Array, ...], lists: Lists, **static: Any
) -> SparsePrefillResult:
    rows = q.shape[:2]
    result = SparsePrefillResult(
        out=jax.empty_ref(jax.ShapeDtypeStruct((*rows, D_V), jnp.bfloat16)),
        max_logits=jax.empty_ref(jax.ShapeDtypeStruct(rows, jnp.float32)),
        lse=jax.empty_ref(jax.ShapeDtypeStruct(rows, jnp.float32)),
    )
    batch = BatchRows(q, result, jnp.int32(0))
    _launch_into(batch, kv, lists, **static)
    return batch.written()


@functools.partial(jax.jit, static_argnames=("num_kv", "pages", "config", "interpret"))
def _launch_into(
    batch: BatchRows,
    kv: tuple[jax.Array, ...],
    lists: Lists,
    *,
    num_kv: int,
    pages: tuple[Pages, ...],
    config: Config,
    interpret: Any,
) -> None:
    _, num_heads, d_qk = batch.q.shape
    num_tokens, topk = lists.indices.shape
    problem = Problem(
        num_tokens=num_tokens,
        num_heads=num_heads,
        d_qk=d_qk,
        num_kv=num_kv,
        topk=topk,
        pages=pages,
    )
    kernel = build(problem, config, interpret)
    kernel(batch.q, *kv, *lists, batch.first_token.reshape(1), *batch.result)


def build(problem: Problem, config: Config, interpret: Any) -> Any:
    """The kernel as a function of Gmem's fields, the last three of which are refs.

    With pages, each cache is an argument in the place of kv.
    """
    seams = seams_cuda if interpret is None else seams_interpret
    scratch = scratch_types(problem, seams)
    produce = paged_producer.produce if problem.pages else producer.produce
    roles = Roles(consumers.even_consumer, consumers.odd_consumer, produce)
    if interpret is None:
        check_smem(scratch, reserved=_REDUCTION_BYTES)

    def sparse_prefill_sm90(*refs: Any) -> None:
        q, *others, smem = refs
        if problem.pages:
            caches = len(problem.pages)
            others = [tuple(others[:caches]), *others[caches:]]
        sparse_prefill_body(problem, config, seams, roles, Gmem(q, *others), smem)

    return plgpu.kernel(
        sparse_prefill_sm90,
        out_type=(),
        scratch_types=[scratch],
        grid=(config.ctas_for(problem),),
        grid_names=(CTA_AXIS,),
        num_threads=len(roles),
        thread_name=ROLE_AXIS,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=_REDUCTION_BYTES,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )


def _pad(array: jax.Array, *, axis: int, multiple: int, value: float) -> jax.Array:
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    widths = [(0, missing if a == axis else 0) for a in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=value)
