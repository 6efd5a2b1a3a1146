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

from jax_impl.mosaic.blocks import EVEN, ODD, SIDE_COLUMNS
from jax_impl.mosaic.layouts import ROW, Register
from jax_impl.mosaic.online_softmax import (
    RowState,
    over_columns,
    row_constant,
    zero_accumulator,
)
from jax_impl.prefill.sparse.kernel_sm90.kernel import (
    I32,
    MAXIMUM,
    TOTAL,
    Context,
    OwnTile,
    Tile,
    totals_ready,
)
from jax_impl.prefill.sparse.kernel_sm90.problem import TILE_HEADS
from jax_impl.prefill.sparse.validity import key_is_valid

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def post_totals(k: Context, parity: int, state: RowState) -> None:
    """Tells the other consumer this one's statistics of the whole tile."""
    k.seams.put_rows(k.smem.mailbox.at[TOTAL[parity]], state.total)
    if parity == EVEN:  # the odd consumer writes the statistics
        k.seams.put_rows(k.smem.mailbox.at[MAXIMUM], state.maximum)
    k.seams.arrive(k.smem.barriers, totals_ready[parity])


def load_sink(k: Context, tile: Tile) -> Any:
    """The sinks of a tile's heads. Loaded when the tile begins: its end would wait for them."""
    heads = pl.ds(tile.first_head, TILE_HEADS)
    return plgpu.load(k.gmem.sink.at[heads], layout=ROW, optimized=False)


def finish_tile(k: Context, parity: int, own: OwnTile, state: RowState, sink: Register) -> None:
    """Writes this side's columns of the output; the odd consumer also lse and max_logits.

    Both consumers are at the same reference here, that of the tile's last odd block.
    """
    tile, i = own.tile, own.i
    other = ODD if parity == EVEN else EVEN
    k.seams.wait(k.smem.barriers, totals_ready[other], i)
    total = state.total + k.seams.get_rows(k.smem.mailbox.at[TOTAL[other]])
    total = k.seams.quad_sum(total)
    heads = pl.ds(tile.first_head, TILE_HEADS)

    # A hole is a row of zeros, so a NaN or an infinity in q reaches the sums even of a token
    # without a key, where 0 is due. Only then is it looked up whether there is one.
    total, acc = lax.cond(
        k.seams.any_row(total != total) != 0,
        lambda sums: _zero_without_keys(k, own, *sums),
        lambda sums: sums,
        (total, state.acc),
    )
    empty = total == 0.0
    # The sink joins the denominator and nothing else.
    denominator = total + jnp.exp2(sink * LOG2_E - state.reference)
    factor = jnp.where(empty, 0.0, 1.0 / denominator)
    out = acc * over_columns(factor, acc)
    columns = pl.ds(parity * SIDE_COLUMNS, SIDE_COLUMNS)
    k.seams.store_output(k.gmem.out.at[tile.batch_token, heads, columns], out.astype(jnp.bfloat16))

    if parity == ODD:
        maximum = jnp.maximum(state.maximum, k.seams.get_rows(k.smem.mailbox.at[MAXIMUM]))
        lse = jnp.log(total) + state.reference * LN_2
        k.seams.store_rows(k.gmem.lse.at[tile.batch_token, heads], jnp.where(empty, jnp.inf, lse))
        maximum = jnp.where(empty, -jnp.inf, maximum * LN_2)
        k.seams.store_rows(k.gmem.max_logits.at[tile.batch_token, heads], maximum)


def _zero_without_keys(k: Context, own: OwnTile, total: Register, acc: Register) -> tuple[Any, Any]:
    """The sums, or zeros if no slot of the token is valid. Walks over the index list: rare."""
    token = own.tile.token

    def look(slot: Any, keys: Any) -> Any:
        index = k.gmem.indices[token, slot]
        return keys + key_is_valid(index, slot, k.problem.num_kv, own.length).astype(jnp.int32)

    keys = lax.fori_loop(0, own.length, look, I32(0))
    return lax.cond(
        keys != 0,
        lambda sums: sums,
        lambda sums: (row_constant(0.0), zero_accumulator()),
        (total, acc),
    )
