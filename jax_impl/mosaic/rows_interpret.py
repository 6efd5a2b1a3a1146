"""Seams of a kernel's row values under Pallas' interpreter: what rows.py means.

The interpreter runs a warpgroup as one thread, so a sum over a thread's columns is the row's.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_impl.mosaic.blocks import TILE_ROWS
from jax_impl.mosaic.layouts import Ref, Register


def any_row(condition: Register) -> Any:
    return condition.any().astype(jnp.int32)


def row_partial_sums(matrix: Register) -> Any:
    return matrix.sum(axis=1)


def quad_sum(rows: Register) -> Any:
    return rows


def put_rows(box_smem: Ref, rows: Register) -> None:
    box_smem[pl.ds(0, TILE_ROWS)] = rows


def get_rows(box_smem: Ref) -> Any:
    return box_smem[pl.ds(0, TILE_ROWS)]


def store_weights(place_smem: Ref, weights: Register) -> None:
    place_smem[...] = weights
