"""Lays a plan and its arrays out as the kernel wants them, and launches it."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.decode.kernel_sm90 import consumers, producer, seams_cuda, seams_interpret
from jax_impl.decode.kernel_sm90.config import Config
from jax_impl.decode.kernel_sm90.kernel import (
    ROLE_AXIS,
    WORKER_AXIS,
    Gmem,
    Roles,
    decode_body,
    scratch_types,
)
from jax_impl.decode.kernel_sm90.merging import merge_partials
from jax_impl.decode.kernel_sm90.problem import (
    CLUSTER_AXIS,
    D,
    Problem,
)
from jax_impl.decode.kernel_sm90.work import rows_of_token
from jax_impl.decode.result import DecodeResult
from jax_impl.mosaic.blocks import D_V, TILE_ROWS
from jax_impl.mosaic.scratch import check_smem

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32

    from jax_impl.decode.plan import DecodePlan

# No sum crosses a warp, so Pallas needs no memory for it.
_REDUCTION_BYTES = 0
# The masked score -inf must stay -inf when scaled, so the scale is never 0, nor a number that is
# taken for 0: this is the smallest normal float32. With a scale of 0 the scores are 0 as well.
_SMALLEST_SCALE = 2.0**-126
# Few, so that several items pass through one simulated thread block, one after another.
INTERPRETED_WORKERS = 2


def attend(
    q: Float[Any, "N H 576"],
    kv_cache: Float[Any, "pages P 576"],
    block_table: Int32[Any, "B max_pages"],
    plan: DecodePlan,
    logit_scale: Float32[Any, ""],
    out_scale: Float32[Any, ""],
    *,
    out_dtype: Any,
    config: Config | None = None,
    interpret: Any = None,
) -> DecodeResult:
    """All rows of a plan. There is a page and an entry of the table. logit_scale is a normal number
    > 0, or 0 with queries that are 0 or NaN.

    config: tuning; None for the defaults. interpret: plgpu.InterpretGPUParams, or None for the
    GPU.
    """
    return _launch(
        q, kv_cache, block_table, plan, logit_scale, out_scale,
        out_dtype=jnp.dtype(out_dtype), config=config or Config(), interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))
def _launch(
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    plan: DecodePlan,
    logit_scale: jax.Array,
    out_scale: jax.Array,
    *,
    out_dtype: Any,
    config: Config,
    interpret: Any,
) -> DecodeResult:
    tokens, heads, _ = q.shape
    token_rows = rows_of_token(heads)
    first_item = jnp.asarray(plan.first_item)
    workers = first_item.shape[0] - 2
    if interpret is not None:
        first_item, workers = _dealt_to_fewer(first_item, min(workers, INTERPRETED_WORKERS))
    problem = Problem(
        num_rows=tokens * token_rows,
        heads=token_rows,
        num_pages=kv_cache.shape[0],
        page_size=kv_cache.shape[1],
        max_pages=block_table.shape[1],
        num_requests=block_table.shape[0],
        num_workers=workers,
        cluster=plan.cluster,
        num_partials=plan.num_partials,
        widened=kv_cache.dtype != jnp.bfloat16,
        out_dtype=out_dtype,
    )
    if interpret is not None:  # see seams_interpret.store_widened
        kv_cache = kv_cache.astype(jnp.bfloat16)
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, token_rows - heads), (0, 0)))
    rows = q.reshape(problem.num_rows, D)
    # A copy of queries takes 64 rows at a time.
    rows = jnp.pad(rows, ((0, max(0, TILE_ROWS - problem.num_rows)), (0, 0)))
    base2_scale = jnp.maximum(logit_scale * math.log2(math.e), _SMALLEST_SCALE)
    out = jax.empty_ref(jax.ShapeDtypeStruct((problem.num_rows, D_V), out_dtype))
    lse = jax.empty_ref(jax.ShapeDtypeStruct((problem.num_rows,), jnp.float32))
    operands = (
        rows,
        kv_cache,
        block_table,
        jnp.asarray(plan.items),
        first_item,
        jnp.asarray(plan.row_keys),
        jnp.stack([base2_scale, out_scale]),
    )
    kernel = build(problem, config, interpret)
    # Both launches write rows of the same buffers, each row once.
    partial_out, partial_lse = kernel(*operands, out, lse)
    if plan.merges.shape[0]:
        merges = jnp.asarray(plan.merges)
        merge_partials(partial_out, partial_lse, merges, out, lse, interpret=interpret)
    return DecodeResult(
        jax.freeze(out).reshape(tokens, token_rows, D_V)[:, :heads],
        jax.freeze(lse).reshape(tokens, token_rows)[:, :heads],
    )


def _dealt_to_fewer(first_item: jax.Array, workers: int) -> tuple[jax.Array, int]:
    """The same items, those of neighbouring workers one after another."""
    before = first_item.shape[0] - 2
    bounds = [before * i // workers for i in range(workers + 1)]
    return first_item[jnp.asarray([*bounds, before + 1])], workers


def build(problem: Problem, config: Config, interpret: Any) -> Any:
    """The kernel as a function of Gmem's first fields and the refs of out and lse."""
    seams = seams_cuda if interpret is None else seams_interpret
    scratch = scratch_types(problem, seams)
    roles = Roles(consumers.even_consumer, consumers.odd_consumer, producer.produce)
    if interpret is None:
        check_smem(scratch, reserved=_REDUCTION_BYTES)

    def dcp_decode_sm90(*refs: Any) -> None:
        *gmem, smem = refs
        decode_body(problem, config, seams, roles, Gmem(*gmem), smem)

    # An array without elements can't be an operand.
    partials = max(problem.num_partials, 1)
    cluster = {}
    if problem.cluster > 1:
        cluster = {"cluster": (problem.cluster,), "cluster_names": (CLUSTER_AXIS,)}
    return plgpu.kernel(
        dcp_decode_sm90,
        out_type=[
            jax.ShapeDtypeStruct((partials, TILE_ROWS, D_V), jnp.float32),
            jax.ShapeDtypeStruct((partials, TILE_ROWS), jnp.float32),
        ],
        scratch_types=[scratch],
        grid=(problem.num_workers,),
        grid_names=(WORKER_AXIS,),
        num_threads=len(roles),
        thread_name=ROLE_AXIS,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=_REDUCTION_BYTES,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        **cluster,
        **({} if interpret is None else {"interpret": interpret}),
    )
