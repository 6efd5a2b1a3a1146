"""The kernel's body: one thread block copies a run of one request's rows.

The body is the same on a GPU and under Pallas' interpreter. What only hardware can do is behind
`seams`, a module with one body for each.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kv_cache.kernel_sm90.problem import Config, Problem, rows_layout
from jax_impl.kv_cache.positions import GatheredRows

BLOCK_AXIS = "block"
I32 = jnp.int32


class Gmem(NamedTuple):
    """The operands in global memory."""

    cache: Any  # a page's bytes, or its rows
    block_table: Any  # [n, columns] int32
    seq_lens: Any  # [n] int32
    gather_lens: Any  # [n] int32
    offset: Any  # [1] int32
    workspace: Any  # [n, M, D] bfloat16, written


class Rows(NamedTuple):
    """Rows of one request to copy, an int32 of each."""

    request: Any  # one number
    row: Any  # of the workspace
    page: Any  # one that there is
    token: Any  # within the page
    wanted: Any  # whether the row is to be written, and its token read


def gather_body(problem: Problem, config: Config, seams: ModuleType, gmem: Gmem) -> None:
    """The rows of one thread block; those behind the request's last one cost nothing."""
    blocks = I32(problem.blocks_per_request(config))
    number = lax.axis_index(BLOCK_AXIS)
    request, block = lax.div(number, blocks), lax.rem(number, blocks)
    rows = GatheredRows(
        gmem.seq_lens[request], gmem.gather_lens[request], gmem.offset[0], problem.num_rows
    )
    first = block * config.rows_per_block

    @pl.when(first < rows.count)
    def _copy() -> None:
        place = plgpu.broadcasted_iota(
            I32, (config.rows_per_block,), 0, layout=rows_layout(config.rows_per_block)
        )
        row = rows.first + first + place
        wanted = rows.has(row)
        position = jnp.where(wanted, rows.position(row), 0)
        column = lax.div(position, I32(problem.page_size))
        page = seams.load_pages(
            gmem.block_table, request, jnp.minimum(column, problem.num_columns - 1)
        )
        page = jnp.clip(page, 0, problem.num_pages - 1)
        token = lax.rem(position, I32(problem.page_size))
        seams.copy_rows(
            gmem.cache, gmem.workspace, Rows(request, row, page, token, wanted), problem
        )
