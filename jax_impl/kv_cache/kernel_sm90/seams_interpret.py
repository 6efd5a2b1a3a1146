"""The interpreter's side of the seams: what the hardware's side means, in plain operations.

Pallas' GPU interpreter runs a thread block as one thread and knows nothing of PTX. Functions
mean what their namesakes in seams_cuda say, and touch the same pages and rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_impl.kv_cache import quantize
from jax_impl.kv_cache.formats import Field
from jax_impl.kv_cache.kernel_sm90.problem import Problem

__all__ = ["copy_rows", "load_pages"]


def load_pages(table_gmem: Any, request: Any, column: Any) -> Any:
    # A ref can be indexed by one array only through a read of the whole row.
    return table_gmem[request, :][column]


def copy_rows(cache_gmem: Any, workspace_gmem: Any, rows: Any, problem: Problem) -> None:
    def copy(i: Any, _: None) -> None:
        row, page, token, wanted = (
            lax.dynamic_index_in_dim(array, i, keepdims=False) for array in rows[1:]
        )

        @pl.when(wanted)
        def _copy() -> None:
            workspace_gmem[rows.request, row, :] = _dequantised(cache_gmem, page, token, problem)

    lax.fori_loop(0, rows.row.shape[0], copy, None)


def _dequantised(cache_gmem: Any, page: Any, token: Any, problem: Problem) -> jax.Array:
    quantised = problem.layout.quantised
    if quantised is None:
        return cache_gmem[page, token, :]

    def read(field: Field) -> jax.Array:
        first = problem.layout.first_byte(field, problem.page_size)
        first = first + token * problem.layout.token_stride(field)
        return cache_gmem[page, pl.ds(first, field.size)]

    codes, scales = read(quantised.codes), read(quantised.scales)
    bits = quantize.decode(codes, scales, read(problem.layout.plain), quantised)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
