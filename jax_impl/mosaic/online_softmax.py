"""The online softmax of one consumer, in base-2 logits.

Weights are taken relative to a reference, which is the maximum of some blocks ago: it moves
only when a row has outgrown it by more than 2**growth_limit. The accumulator therefore stays as
it is between most matrix products, and the weights of the even block, once handed over, never
need a second scaling. The weights' bfloat16 rounding is relative, so a larger weight is no less
exact; total and accumulator have the range of float32.

Whether a row's reference moves depends on that row alone. The warp votes only on whether
anybody has to multiply (by 1 in the rows that stay): a row's bits do not depend on the other
rows in its tile, be they heads of its token or other tokens with other bounds.

`k` is a kernel's context, of which config.growth_limit and seams.any_row are used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic.blocks import SIDE_COLUMNS, TILE_ROWS
from jax_impl.mosaic.layouts import MATRIX, ROW, Register

# Finite, so that the difference of two references is a number; as FlashMLA's kernel starts.
_LOWEST = -1e30


class RowState(NamedTuple):
    """A consumer's running result for 64 rows."""

    acc: Register  # [64, 256] weights times values, relative to the reference
    reference: Register  # [64] the base-2 logit whose weight is 1
    maximum: Register  # [64] largest base-2 logit among this consumer's own blocks; None: not kept
    total: Register  # [64] sum of its own weights, relative to the reference; a part per thread


def initial_state(*, keeps_maximum: bool) -> RowState:
    return RowState(
        acc=zero_accumulator(),
        reference=row_constant(_LOWEST),
        maximum=row_constant(-jnp.inf) if keeps_maximum else None,
        total=row_constant(0.0),
    )


def zero_accumulator() -> Register:
    return plgpu.layout_cast(jnp.zeros((TILE_ROWS, SIDE_COLUMNS), jnp.float32), MATRIX)


def row_constant(value: float) -> Register:
    return plgpu.layout_cast(jnp.full((TILE_ROWS,), value, jnp.float32), ROW)


def over_columns(rows: Register, matrix: Register) -> Register:
    """A value per row, in the shape of the matrix."""
    return lax.broadcast_in_dim(rows, matrix.shape, [0])


def move_reference(k: Any, state: RowState, block_maximum: Register) -> tuple[RowState, Any, Any]:
    """Takes the largest logit of each row of a block into maximum and reference.

    Returns the state with its total (not yet its accumulator) relative to the new reference,
    the factor from the old to the new one, and whether some row of the warp has moved.
    """
    outgrown = block_maximum > state.reference + k.config.growth_limit
    moved = jnp.where(outgrown, block_maximum, state.reference)
    factor = jnp.exp2(state.reference - moved)
    if state.maximum is not None:
        state = state._replace(maximum=jnp.maximum(state.maximum, block_maximum))
    state = state._replace(reference=moved, total=state.total * factor)
    return state, factor, k.seams.any_row(outgrown)


def adopt_reference(k: Any, state: RowState, reference: Register) -> RowState:
    """Makes the state relative to the reference that the other consumer has moved to."""
    factor = jnp.exp2(state.reference - reference)
    moved = k.seams.any_row(reference > state.reference)
    return state._replace(
        acc=rescaled(state.acc, factor, moved), reference=reference, total=state.total * factor
    )


def rescaled(acc: Register, factor: Register, moved: Register) -> Register:
    return lax.cond(moved != 0, lambda a: a * over_columns(factor, a), lambda a: a, acc)


def weights_of(logits: Register, reference: Register) -> tuple[Any, Any]:
    """exp2 of the logits: exact to float32 for the sum, rounded for the matrix product."""
    weights = jnp.exp2(logits - over_columns(reference, logits))
    return weights, weights.astype(jnp.bfloat16)


def check_growth_limit(growth_limit: float) -> None:
    if not 0 <= growth_limit <= 64:
        raise ValueError(f"growth_limit must lie in [0, 64]; got {growth_limit}")
