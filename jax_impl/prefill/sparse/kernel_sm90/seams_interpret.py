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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kv_cache import PagedKV
from jax_impl.mosaic import products_interpret
from jax_impl.mosaic.blocks import BLOCK_KEYS, LEFT, RIGHT
from jax_impl.mosaic.layouts import TILE_COLUMNS, Ref, Register
from jax_impl.mosaic.products_interpret import matmul_scratch
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
    arrive_after_copies,
    barrier_scratch,
    initialise_barriers,
    wait,
)
from jax_impl.prefill.sparse.kernel_sm90.problem import PLAIN_TILE, TILE_HEADS, Problem
from jax_impl.prefill.sparse.paged_rows import read_rows

__all__ = [
    "any_row",
    "arrive",
    "arrive_after_copies",
    "barrier_scratch",
    "get_rows",
    "initialise_barriers",
    "matmul_scratch",
    "put_rows",
    "quad_sum",
    "row_partial_sums",
    "store_weights",
    "wait",
]


def load_indices(indices_gmem: Ref, token: Any, first_slot: Any, layout: Any) -> Any:
    del layout
    return indices_gmem[token, pl.ds(first_slot, BLOCK_KEYS)]


def publish(values_smem: Ref, values: Any, layout: Any) -> None:
    del layout
    values_smem[...] = values


def copy_columns(
    kv_gmem: Ref,
    kv_smem: Ref,
    slot: int,
    *,
    tiles: Sequence[int],
    rows: Any,
    valid: Any,
    l2_prefetch: str,
) -> None:
    del l2_prefetch
    if not len(tiles):
        return
    columns = _columns(tiles[0], tiles[-1] + 1)
    # A ref can be indexed by one array only through a whole read; one read serves all 64 rows.
    copied = kv_gmem[:, columns][rows]
    kv_smem[slot, :, columns] = jnp.where(valid[:, None], copied, jnp.zeros_like(copied))


def load_scales(
    caches_gmem: Sequence[Ref], slots: Any, places: Any, after: Any, problem: Problem
) -> Any:
    del caches_gmem, slots, places, after, problem  # load_columns brings them along
    return jnp.int32(0)


def locate(caches_gmem: Sequence[Ref], slots: Any, problem: Problem) -> Any:
    del caches_gmem, problem
    return slots


def load_columns(
    caches_gmem: Sequence[Ref],
    places: Any,
    tiles: Sequence[int],
    after: Any,
    problem: Problem,
    l2_prefetch: str,
) -> Any:
    del after, l2_prefetch
    exists = places >= 0
    # A ref can be indexed by arrays only through a whole read.
    caches = [
        PagedKV(cache[...], pages.page_size, "v4-fp8")
        for cache, pages in zip(caches_gmem, problem.pages, strict=True)
    ]
    num_slots = [pages.num_slots for pages in problem.pages]
    rows = read_rows(caches, num_slots, jnp.where(exists, places, 0))
    columns = rows[:, tiles[0] * TILE_COLUMNS : (tiles[-1] + 1) * TILE_COLUMNS]
    return [jnp.where(exists[:, None], columns, jnp.zeros_like(columns))]


def copy_plain(
    caches_gmem: Sequence[Ref],
    kv_smem: Ref,
    slot: int,
    places: Any,
    problem: Problem,
    l2_prefetch: str,
) -> None:
    tiles = (PLAIN_TILE,)
    columns = load_columns(caches_gmem, places, tiles, None, problem, l2_prefetch)
    store_columns(kv_smem, slot, tiles, columns, None, problem)


def unusual_scales(scales: Any) -> Any:
    return scales


def arrived(loaded: Sequence[Any]) -> Any:
    del loaded  # nothing is ever on its way
    return jnp.int32(0)


def note_unusual(loaded: Sequence[Any], unusual: Any) -> Any:
    del loaded
    return unusual


def any_unusual(unusual: Any) -> Any:
    return unusual


def store_columns(
    kv_smem: Ref,
    slot: int,
    tiles: Sequence[int],
    loaded: Sequence[Any],
    scales: Any,
    problem: Problem,
) -> None:
    del scales, problem
    kv_smem[slot, :, _columns(tiles[0], tiles[-1] + 1)] = loaded[0]


def store_exactly(
    kv_smem: Ref,
    slot: int,
    tiles: Sequence[int],
    caches_gmem: Sequence[Ref],
    places: Any,
    scales: Any,
    problem: Problem,
) -> None:
    del scales
    columns = load_columns(caches_gmem, places, tiles, None, problem, "")
    store_columns(kv_smem, slot, tiles, columns, None, problem)


def prefetch_page_rows(
    caches_gmem: Sequence[Ref],
    slots: Sequence[Any],
    tile_number: Any,
    sharers: int,
    problem: Problem,
) -> None:
    del caches_gmem, slots, tile_number, sharers, problem


def prefetch_queries(q_gmem: Ref, tile_number: Any) -> None:
    del q_gmem, tile_number


def prefetch_rows(
    kv_gmem: Ref, indices: Sequence[Any], exists: Sequence[Any], tile_number: Any, sharers: int
) -> None:
    del kv_gmem, indices, exists, tile_number, sharers


def start_scores(
    scores: Register, q_smem: Sequence[Ref], keys_smem: Ref, tiles: Sequence[int], problem: Problem
) -> Any:
    split = problem.right_tiles.start
    if scores is None:
        scores = jnp.zeros((TILE_HEADS, BLOCK_KEYS), jnp.float32)
    for first, last in _runs(tiles, split):
        side, skipped = (LEFT, 0) if first < split else (RIGHT, split)
        queries = q_smem[side][:, _columns(first - skipped, last - skipped)]
        keys = keys_smem[:, _columns(first, last)]
        scores = scores + products_interpret.product(queries, keys, contract=(1, 1))
    return scores


def start_values_of_registers(
    acc: Register, weights: Register, values_smem: Ref, side: int, problem: Problem
) -> Any:
    tiles = problem.value_tiles(side)
    values = values_smem[:, _columns(tiles.start, tiles.stop)]
    return acc + products_interpret.product(weights, values, contract=(1, 0))


def start_values_of_smem(
    acc: Register, weights_smem: Ref, values_smem: Ref, side: int, problem: Problem
) -> Any:
    tile = problem.weights_tile
    weights = weights_smem[:, _columns(tile, tile + 1)]
    return start_values_of_registers(acc, weights, values_smem, side, problem)


def finish_products(in_flight: int, *arrays: Any) -> list[Any]:
    # The tensor core reads shared memory as the TMA unit does, through the async proxy: what a
    # finished product has read may be overwritten by a TMA copy without a fence. The
    # interpreter read it like a load, and has to be told.
    if not in_flight:
        plgpu.commit_smem()
    return list(arrays)


def store_output(out_gmem: Ref, out: Any) -> None:
    out_gmem[...] = out


def store_rows(rows_gmem: Ref, rows: Any) -> None:
    rows_gmem[...] = rows


def _columns(first_tile: int, end_tile: int) -> pl.Slice:
    return pl.ds(first_tile * TILE_COLUMNS, (end_tile - first_tile) * TILE_COLUMNS)


def _runs(tiles: Sequence[int], split: int) -> list[tuple[int, int]]:
    """Column tiles as half-open runs, cut where the second part of Q begins."""
    runs: list[tuple[int, int]] = []
    for tile in tiles:
        if runs and runs[-1][1] == tile != split:
            runs[-1] = (runs[-1][0], tile + 1)
        else:
            runs.append((tile, tile + 1))
    return runs
