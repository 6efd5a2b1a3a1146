"""The end of a tile: the consumers add up their sums, and each writes its half of the output.

Results go from registers straight to global memory. There is no shared memory left to stage
them, and no need: the next tile's gather is already filling it.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic.layouts import COLUMN, ROW
from jax_impl.prefill.kernel_sm90 import barriers
from jax_impl.prefill.kernel_sm90.context import MAXIMUM, TOTAL, Context, OwnTile, Tile
from jax_impl.prefill.kernel_sm90.problem import EVEN, ODD, SIDE_COLUMNS, TILE_HEADS
from jax_impl.prefill.kernel_sm90.softmax import RowState, over_columns, zero_accumulator

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def post_totals(k: Context, parity: int, state: RowState) -> None:
    """Tells the other consumer this one's statistics of the whole tile."""
    k.seams.put_rows(k.smem.mailbox.at[TOTAL[parity]], state.total)
    if parity == EVEN:  # the odd consumer writes the statistics
        k.seams.put_rows(k.smem.mailbox.at[MAXIMUM], state.maximum)
    k.seams.arrive(k.smem.barriers, barriers.totals_ready[parity])


def load_sink(k: Context, tile: Tile) -> Any:
    """The sinks of a tile's heads. Loaded when the tile begins: its end would wait for them."""
    heads = pl.ds(tile.first_head, TILE_HEADS)
    return plgpu.load(k.gmem.sink.at[heads], layout=ROW, optimized=False)


def finish_tile(k: Context, parity: int, own: OwnTile, state: RowState, sink: Any) -> None:
    """Writes this side's columns of the output; the odd consumer also lse and max_logits.

    Both consumers are at the same reference here, that of the tile's last odd block.
    """
    tile, i = own.tile, own.i
    other = ODD if parity == EVEN else EVEN
    k.seams.wait(k.smem.barriers, barriers.totals_ready[other], i)
    total = state.total + k.seams.get_rows(k.smem.mailbox.at[TOTAL[other]])
    total = k.seams.quad_sum(total)
    heads = pl.ds(tile.first_head, TILE_HEADS)

    no_key = _no_key(k, i & 1)
    empty = no_key | (total == 0.0)
    # The sink joins the denominator and nothing else.
    denominator = total + jnp.exp2(sink * LOG2_E - state.reference)
    factor = jnp.where(empty, 0.0, 1.0 / denominator)
    # NaN in q makes the accumulator NaN even in a token without a key, where 0 is due.
    out = lax.cond(
        k.seams.any_row(no_key) != 0,
        lambda acc: zero_accumulator(),
        lambda acc: acc * over_columns(factor, acc),
        state.acc,
    )
    columns = pl.ds(parity * SIDE_COLUMNS, SIDE_COLUMNS)
    k.seams.store_output(k.gmem.out.at[tile.token, heads, columns], out.astype(jnp.bfloat16))

    if parity == ODD:
        maximum = jnp.maximum(state.maximum, k.seams.get_rows(k.smem.mailbox.at[MAXIMUM]))
        lse = jnp.log(total) + state.reference * LN_2
        k.seams.store_rows(k.gmem.lse.at[tile.token, heads], jnp.where(empty, jnp.inf, lse))
        maximum = jnp.where(empty, -jnp.inf, maximum * LN_2)
        k.seams.store_rows(k.gmem.max_logits.at[tile.token, heads], maximum)


def _no_key(k: Context, tile_parity: Any) -> Any:
    """Whether the token has no valid slot at all; the same in every row of the tile.

    The sums can't tell: a NaN in q reaches them through the zeros that stand for a hole.
    """
    live = plgpu.load(k.smem.liveness.at[tile_parity], layout=COLUMN, optimized=False)
    live = lax.broadcast_in_dim(live, (TILE_HEADS, live.shape[0]), [1])
    return live.max(axis=1) < 0.0
