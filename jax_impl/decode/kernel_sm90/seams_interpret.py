"""The interpreter's side of the seams: what the hardware's side means, in plain operations.

Pallas' GPU interpreter runs each warpgroup as one thread, knows Pallas' own barriers, memory
and copies, and nothing of PTX. A seam here is one operation per block of keys, and it reads and
writes exactly the columns that the hardware would: the race detector sees every access.
Functions mean what their namesakes in seams_cuda say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.decode.kernel_sm90.problem import CHUNK_COLUMNS, Problem, side_columns
from jax_impl.mosaic import products_interpret
from jax_impl.mosaic.blocks import BLOCK_KEYS, SIDE_COLUMNS, TILE_ROWS
from jax_impl.mosaic.layouts import Ref, Register
from jax_impl.mosaic.products_interpret import finish_products, matmul_scratch
from jax_impl.mosaic.rows_interpret import (
    any_row,
    get_rows,
    put_rows,
    quad_sum,
    row_partial_sums,
    store_weights,
)
from jax_impl.mosaic.synchronisation_interpret import (
    arrive,
    barrier_scratch,
    initialise_barriers,
    wait,
)

__all__ = [
    "any_row",
    "arrive",
    "barrier_scratch",
    "finish_products",
    "get_rows",
    "initialise_barriers",
    "matmul_scratch",
    "put_rows",
    "quad_sum",
    "row_partial_sums",
    "store_weights",
    "wait",
]


def load_narrow(
    kv_gmem: Ref, pages: tuple[Any, ...], first_in_page: Any, columns: Any, problem: Problem
) -> Any:
    del kv_gmem, columns, problem
    return [*pages, jnp.asarray(first_in_page, jnp.int32)]  # only what to copy


def widened_arrivals(problem: Problem) -> int:
    return problem.pages_per_block


def store_widened(
    place_smem: Ref, ready: Any, loaded: Any, kv_gmem: Ref, columns: Any, problem: Problem
) -> None:
    # The launch has widened the cache. Arithmetic in this role would have XLA share it out
    # among as many threads as there are cores, which all may be waiting for this very role.
    rows = problem.rows_per_copy
    *pages, first_in_page = loaded
    for part, page in enumerate(pages):
        source = kv_gmem.at[page, pl.ds(first_in_page, rows), columns]
        plgpu.copy_gmem_to_smem(source, place_smem.at[pl.ds(part * rows, rows)], ready)


def start_scores(scores: Register, q_smem: Sequence[Ref], keys_smem: Ref, chunk: int) -> Any:
    columns = keys_smem.shape[-1]
    first = chunk * CHUNK_COLUMNS
    side = min(first // SIDE_COLUMNS, 1)
    queries = q_smem[side][:, pl.ds(first - side * SIDE_COLUMNS, columns)]
    if scores is None:
        scores = jnp.zeros((TILE_ROWS, BLOCK_KEYS), jnp.float32)
    return scores + products_interpret.product(queries, keys_smem[...], contract=(1, 1))


def start_values_of_registers(acc: Register, weights: Register, *chunks_smem: Ref) -> Any:
    products = [
        products_interpret.product(weights, chunk[...], contract=(1, 0)) for chunk in chunks_smem
    ]
    return acc + jnp.concatenate(products, axis=1)


def start_values_of_smem(acc: Register, weights_smem: Ref, *chunks_smem: Ref) -> Any:
    return start_values_of_registers(acc, weights_smem[...], *chunks_smem)


def load_row_keys(row_keys_gmem: Ref, first_row: Any, problem: Problem) -> Any:
    rows = jnp.minimum(first_row + jnp.arange(TILE_ROWS), problem.num_rows - 1)
    # A ref can be indexed by one array only through a whole read.
    return row_keys_gmem[...][rows // problem.heads]


def clear_rows_from(chunk_smem: Ref, first: Any) -> None:
    values = chunk_smem[...]
    behind = jnp.arange(values.shape[0])[:, None] >= first
    chunk_smem[...] = jnp.where(behind, jnp.zeros_like(values), values)


def store_output(out_gmem: Ref, first_row: Any, num_rows: Any, side: int, out: Any) -> None:
    def store(i: Any, _: None) -> None:
        out_gmem[first_row + i, side_columns(side)] = lax.dynamic_index_in_dim(out, i, 0, False)

    lax.fori_loop(0, num_rows, store, None)


def store_rows(rows_gmem: Ref, first_row: Any, num_rows: Any, rows: Any) -> None:
    def store(i: Any, _: None) -> None:
        rows_gmem[first_row + i] = lax.dynamic_index_in_dim(rows, i, 0, False)

    lax.fori_loop(0, num_rows, store, None)
