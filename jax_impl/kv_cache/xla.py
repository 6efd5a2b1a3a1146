"""The gather in plain jax.numpy: no Pallas, any platform, reads like the rule (positions.py).

Requests are worked through in blocks of rows, each read, dequantised and put in its place: what
is needed beside the workspace doesn't grow with it. A request costs what the longest one gathers.

On a CPU, outside jit, NumPy reads and writes, and a program that all gathers have in common
dequantises: compiling one for a cache and a workspace takes longer than running it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.kv_cache.paged import PagedKV
from jax_impl.kv_cache.positions import GatheredRows
from jax_impl.kv_cache.tokens import row_bits

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Int32

BLOCK_ROWS = 256


def gather_on_host(
    paged: PagedKV,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    workspace: np.ndarray,
    *,
    gather_lens: np.ndarray,
    offset: int,
) -> None:
    """The same with NumPy's arrays, the cache's too, into the workspace."""
    bits = workspace.view(np.uint16)
    num_rows = workspace.shape[1]
    for b in range(len(seq_lens)):
        rows = GatheredRows(seq_lens[b], gather_lens[b], np.int32(offset), num_rows)
        row = np.arange(num_rows, dtype=np.int32)
        row = row[rows.has(row)]
        position = rows.position(row)
        column = np.clip(position // paged.page_size, 0, block_table.shape[1] - 1)
        bits[b, row] = row_bits(paged, block_table[b, column], position % paged.page_size)


@jax.jit
def gather(
    paged: PagedKV,
    block_table: Int32[Array, "n columns"],
    seq_lens: Int32[Array, " n"],
    gather_lens: Int32[Array, " n"],
    workspace: BFloat16[Array, "n M D"],
    offset: Int32[Array, ""],
) -> BFloat16[Array, "n M D"]:
    """Everything has at least one element."""
    requests, num_rows, width = workspace.shape
    block = min(BLOCK_ROWS, num_rows)
    # One loop over the blocks of all requests, as many for each as the longest one needs.
    longest = GatheredRows(seq_lens, gather_lens, offset, num_rows).count.max()
    blocks = lax.div(longest + (block - 1), block)

    def gather_block(i: jax.Array, workspace: jax.Array) -> jax.Array:
        b = lax.div(i, blocks)
        rows = GatheredRows(seq_lens[b], gather_lens[b], offset, num_rows)
        # The last block of a workspace overlaps the one before, and writes the same again.
        first = jnp.minimum(rows.first + (i - b * blocks) * block, num_rows - block)
        row = first + jnp.arange(block)
        position = rows.position(row)
        column = jnp.clip(position // paged.page_size, 0, block_table.shape[1] - 1)
        new = row_bits(paged, block_table[b, column], position % paged.page_size)
        # As bits: a bfloat16 that is selected may come out as another NaN.
        here = (b, first, jnp.int32(0))
        old = lax.dynamic_slice(workspace, here, (1, block, width))
        old = lax.bitcast_convert_type(old, jnp.uint16)
        bits = jnp.where(rows.has(row)[:, None], new, old)
        return lax.dynamic_update_slice(
            workspace, lax.bitcast_convert_type(bits, jnp.bfloat16), here
        )

    return lax.fori_loop(0, requests * blocks, gather_block, workspace)
