"""Launches the gather kernel on a workspace that it writes in place."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kv_cache.kernel_sm90 import seams_cuda, seams_interpret
from jax_impl.kv_cache.kernel_sm90.kernel import BLOCK_AXIS, Gmem, gather_body
from jax_impl.kv_cache.kernel_sm90.problem import Config, Problem
from jax_impl.kv_cache.paged import PagedKV

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Int32


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def gather_into(
    paged: PagedKV,
    block_table: Int32[Array, "n columns"],
    seq_lens: Int32[Array, " n"],
    gather_lens: Int32[Array, " n"],
    workspace: Any,
    offset: Int32[Array, ""],
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> None:
    """Writes into a ref [n, M, D] bfloat16. Everything has at least one element.

    Lengths and offset are operands: one program serves all of them. config: tuning; None for
    the defaults. interpret: plgpu.InterpretGPUParams, or None for the GPU.
    """
    requests, num_rows, _ = workspace.shape
    problem = Problem(
        kv_format=paged.kv_format,
        page_size=paged.page_size,
        num_pages=paged.num_pages,
        num_columns=block_table.shape[1],
        num_requests=requests,
        num_rows=num_rows,
    )
    kernel = build(problem, config or Config(), interpret)
    kernel(paged.cache, block_table, seq_lens, gather_lens, offset.reshape(1), workspace)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def gather(
    paged: PagedKV,
    block_table: Int32[Array, "n columns"],
    seq_lens: Int32[Array, " n"],
    gather_lens: Int32[Array, " n"],
    workspace: BFloat16[Array, "n M D"],
    offset: Int32[Array, ""],
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "n M D"]:
    """gather_into of a copy of the workspace."""
    ref = jax.new_ref(workspace)
    gather_into(
        paged, block_table, seq_lens, gather_lens, ref, offset, config=config, interpret=interpret
    )
    return jax.freeze(ref)


def build(problem: Problem, config: Config, interpret: Any) -> Any:
    """The kernel as a function of Gmem's fields, the last of which is a ref."""
    seams = seams_cuda if interpret is None else seams_interpret

    def gather_kv_sm90(*refs: Any) -> None:
        gather_body(problem, config, seams, Gmem(*refs))

    return plgpu.kernel(
        gather_kv_sm90,
        out_type=(),
        grid=(problem.num_requests * problem.blocks_per_request(config),),
        grid_names=(BLOCK_AXIS,),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
