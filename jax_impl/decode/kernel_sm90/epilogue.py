"""The end of an item: the consumers add up their sums, and each writes its half of the output.

Results go from registers straight to global memory. There is no shared memory left to stage
them, and no need: the next item's keys are already filling it.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_impl.decode.kernel_sm90.kernel import TOTAL, Context, Item, totals_ready
from jax_impl.decode.kernel_sm90.problem import side_columns
from jax_impl.mosaic.blocks import EVEN, LEFT, ODD, PAIR_KEYS
from jax_impl.mosaic.online_softmax import (
    RowState,
    over_columns,
    row_constant,
    zero_accumulator,
)

LN_2 = math.log(2.0)


def post_totals(k: Context, parity: int, state: RowState) -> None:
    """Tells the other consumer this one's sums of the whole item."""
    k.seams.put_rows(k.smem.mailbox.at[TOTAL[parity]], state.total)
    k.seams.arrive(k.smem.handover, totals_ready[parity])


def finish_item(k: Context, parity: int, item: Item, i: Any, state: RowState) -> None:
    """Writes this side's columns of the output; the odd consumer also lse.

    i: how many items this thread block has finished before. Both consumers are at the same
    reference here, that of the item's last odd block.
    """
    other = ODD if parity == EVEN else EVEN
    k.seams.wait(k.smem.handover, totals_ready[other], i)
    total = state.total + k.seams.get_rows(k.smem.mailbox.at[TOTAL[other]])
    total = k.seams.quad_sum(total)

    # Emptiness is counted, since a NaN must not pass for it.
    row_keys = k.seams.get_rows(k.smem.row_keys.at[parity])
    empty = (row_keys <= item.first_pair * PAIR_KEYS) | (total == 0.0)
    factor = jnp.where(empty, 0.0, k.gmem.scales[1] / total)
    out = state.acc * over_columns(factor, state.acc)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + state.reference * LN_2)

    @pl.when(item.partial >= 0)
    def _leave_for_merging() -> None:
        k.gmem.partial_out.at[item.partial, :, side_columns(parity)][...] = out
        if parity == ODD:
            k.gmem.partial_lse.at[item.partial][...] = lse

    @pl.when(item.partial < 0)
    def _finish() -> None:
        _store(k, parity, item, out, lse)


def write_rows_without_keys(k: Context, side: int) -> None:
    """This thread block's share of the rows that see nothing, padding among them."""
    workers = k.problem.num_workers
    first_item = k.gmem.first_item
    start, end = first_item[workers] + k.worker, first_item[workers + 1]
    count = lax.div(jnp.maximum(end - start, 0) + (workers - 1), jnp.int32(workers))

    def write(i: Any, _: None) -> None:
        item = k.item(start + i * workers)
        _store(k, side, item, zero_accumulator(), row_constant(-jnp.inf))

    lax.fori_loop(0, count, write, None)


def _store(k: Context, side: int, item: Item, out: Any, lse: Any) -> None:
    out = out.astype(k.problem.out_dtype)
    k.seams.store_output(k.gmem.out, item.first_row, item.num_rows, side, out)
    if side != LEFT:
        k.seams.store_rows(k.gmem.lse, item.first_row, item.num_rows, lse)
