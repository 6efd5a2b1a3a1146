"""The second launch: rows whose keys were split are made from their partial results.

One thread block per row. Partial results are normalised, in float32, each with the natural-log
sum of its exponentials; they are taken in the order of their keys, so a row's bits depend on
where its keys were cut and on nothing else. A row all of whose keys lie in one partial result
comes out as if it had never been split.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.decode.kernel_sm90 import work
from jax_impl.mosaic.blocks import D_V

LOG2_E = math.log2(math.e)
_AT_A_TIME = 4  # loads in flight
_VECTOR = D_V // 128
_LOWEST = -1e30


def merge_partials(
    partial_out: jax.Array,
    partial_lse: jax.Array,
    merges: jax.Array,
    out: Any,
    lse: Any,
    *,
    interpret: Any,
) -> None:
    """Writes the rows that `merges` [M, 4] names (work.py) into the refs out and lse."""
    layout = plgpu.Layout.WG_STRIDED((D_V,), _VECTOR)

    def merge_row(partial_out, partial_lse, merges, out, lse) -> None:
        merge, row = lax.axis_index("merge"), lax.axis_index("row")
        first_row, num_rows, first, end = (merges[merge, i] for i in range(work.MERGE_FIELDS))

        def take(i: Any, carry: Any) -> Any:
            acc, reference, total = carry
            places = [first + i * _AT_A_TIME + n for n in range(_AT_A_TIME)]
            safe = [jnp.minimum(place, end - 1) for place in places]
            logs = [
                jnp.where(place < end, partial_lse[at, row], -jnp.inf)
                for place, at in zip(places, safe, strict=True)
            ]
            values = [
                plgpu.load(partial_out.at[at, row], layout=layout, optimized=False) for at in safe
            ]
            moved = reference
            for log in logs:
                moved = jnp.maximum(moved, log)
            factor = jnp.exp2((reference - moved) * LOG2_E)
            acc, total = acc * factor, total * factor
            for log, value in zip(logs, values, strict=True):
                weight = jnp.exp2((log - moved) * LOG2_E)
                acc, total = acc + value * weight, total + weight
            return acc, moved, total

        @pl.when(row < num_rows)
        def _merge() -> None:
            zero = plgpu.layout_cast(jnp.zeros((D_V,), jnp.float32), layout)
            rounds = lax.div(end - first + (_AT_A_TIME - 1), jnp.int32(_AT_A_TIME))
            start = (zero, jnp.float32(_LOWEST), jnp.float32(0.0))
            acc, reference, total = lax.fori_loop(0, rounds, take, start)
            empty = total == 0.0  # never of a NaN
            factor = jnp.where(empty, 0.0, 1.0 / total)
            out.at[first_row + row][...] = (acc * factor).astype(out.dtype)
            lse[first_row + row] = jnp.where(empty, -jnp.inf, reference + jnp.log(total))

    plgpu.kernel(
        merge_row,
        out_type=(),
        grid=(merges.shape[0], work.TILE_ROWS),
        grid_names=("merge", "row"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(partial_out, partial_lse, merges, out, lse)
