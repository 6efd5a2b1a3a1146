"""The two consumers. Each scores every other key block and owns half of the output columns.

Order of events for a pair of blocks (0 = even, 1 = odd; L, R = columns 0-255, 256-511):

    even consumer                           odd consumer
    softmax of S0                           S1 = Q K1^T
    O_L += P0 V0_L, hands P0 over           waits for P0
    waits for P1                            O_R += P0 V0_R, meanwhile softmax of S1
    O_L += P1 V1_L                          hands P1 over
    next S0 = Q K0^T                        O_R += P1 V1_R

Both multiply the same weights, taken from their own registers or, the other's, from shared
memory. The reference maximum is handed over with them, so both end a pair with the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.mosaic import online_softmax as softmax
from jax_impl.mosaic.blocks import EVEN, LEFT, ODD, RIGHT, SIDE_COLUMNS, SIDES
from jax_impl.mosaic.layouts import COLUMN, Register
from jax_impl.mosaic.online_softmax import RowState
from jax_impl.prefill.sparse.kernel_sm90.epilogue import finish_tile, load_sink, post_totals
from jax_impl.prefill.sparse.kernel_sm90.kernel import (
    I32,
    REFERENCE,
    Context,
    OwnTile,
    Tile,
    kv_free,
    kv_ready,
    weights_ready,
)
from jax_impl.prefill.sparse.kernel_sm90.problem import TILE_HEADS


def load_queries(k: Context, tile: Tile) -> None:
    """Starts the copy of a tile's queries, in two parts: the scores can begin with the first."""
    rows = pl.ds(tile.first_head, TILE_HEADS)
    for side, columns in enumerate((pl.ds(0, SIDE_COLUMNS), k.problem.columns_from_right)):
        plgpu.copy_gmem_to_smem(
            k.gmem.q.at[tile.batch_token, rows, columns], k.smem.q[side], k.smem.q_ready.at[side]
        )


def _wait_for_keys(k: Context, slot: int, side: int, round_: Any) -> None:
    ready = kv_ready[slot][side]
    k.seams.wait(k.smem.barriers, ready, round_, before_products=True)


def _free(k: Context, slot: int, side: int) -> None:
    k.seams.arrive(k.smem.barriers, kv_free[slot][side])


def _start_scores(k: Context, scores: Register, slot: int, *tiles: range) -> Any:
    """Q K^T over some column tiles, on top of `scores` (None: from zero)."""
    chosen = [tile for group in tiles for tile in group]
    return k.seams.start_scores(scores, k.smem.q, k.smem.kv.at[slot], chosen, k.problem)


def _start_own_values(
    k: Context, state: RowState, weights: Register, slot: int, side: int
) -> RowState:
    """acc += weights from registers times this side's values of a slot."""
    values = k.smem.kv.at[slot]
    acc = k.seams.start_values_of_registers(state.acc, weights, values, side, k.problem)
    return state._replace(acc=acc)


def _start_other_values(k: Context, state: RowState, slot: int, side: int) -> RowState:
    """acc += weights of a block that the other consumer has handed over."""
    values = k.smem.kv.at[slot]
    weights = values if k.problem.weights_in_rope else k.smem.weights[0].at[slot]
    acc = k.seams.start_values_of_smem(state.acc, weights, values, side, k.problem)
    return state._replace(acc=acc)


def _hand_over(k: Context, parity: int, reference: Register, weights: Register) -> None:
    if k.problem.weights_in_rope:
        place = k.smem.kv.at[parity, :, k.problem.rope_columns]
    else:
        place = k.smem.weights[0].at[parity]
    k.seams.store_weights(place, weights)
    k.seams.put_rows(k.smem.mailbox.at[REFERENCE[parity]], reference)
    ready = weights_ready[parity]
    k.seams.arrive(k.smem.barriers, ready, before_products=True)


def _handed_over_reference(k: Context, parity: int) -> Any:
    return k.seams.get_rows(k.smem.mailbox.at[REFERENCE[parity]])


def _finish_values(k: Context, state: RowState) -> RowState:
    (acc,) = k.seams.finish_products(0, state.acc)
    return state._replace(acc=acc)


def _masked_logits(k: Context, scores: Register, slot: int, scale: Register) -> Any:
    """Base-2 logits of one block, -inf at its holes.

    The mask is added, which is free: the product and the sum are one instruction. A hole's
    score is exactly 0, its row being zeros, unless q itself holds a NaN or an infinity.
    """
    mask = plgpu.load(k.smem.mask.at[slot], layout=COLUMN, optimized=False)
    return scores * scale + lax.broadcast_in_dim(mask, scores.shape, [1])


def even_consumer(k: Context) -> None:
    """Scores even blocks and owns the left half of the output."""
    plgpu.set_max_registers(k.config.consumer_registers, action="increase")
    load_queries(k, k.own_tile(I32(0)))
    scale = k.gmem.scale[0]

    def compute_tile(own: OwnTile, rounds: Any) -> Any:
        sink = load_sink(k, own.tile)
        scores = _first_even_scores(k, rounds)

        def middle(p: Any, carry: Any) -> Any:
            state, scores = carry
            state = _even_pair(k, state, scores, scale, rounds + p)
            return _next_even_scores(k, state, rounds + p + 1)

        carry = (softmax.initial_state(keeps_maximum=True), scores)
        state, scores = lax.fori_loop(0, own.num_pairs - 1, middle, carry)
        state = _even_pair(k, state, scores, scale, rounds + own.num_pairs - 1)
        state = _finish_values(k, state)
        _free(k, ODD, LEFT)

        post_totals(k, EVEN, state)
        finish_tile(k, EVEN, own, state, sink)
        return rounds + own.num_pairs

    k.for_own_tiles(compute_tile, I32(0))


def _first_even_scores(k: Context, round_: Any) -> Any:
    plgpu.barrier_wait(k.smem.q_ready.at[LEFT])
    _wait_for_keys(k, EVEN, LEFT, round_)
    scores = _start_scores(k, None, EVEN, k.problem.left_tiles)
    plgpu.barrier_wait(k.smem.q_ready.at[RIGHT])
    _wait_for_keys(k, EVEN, RIGHT, round_)
    scores = _start_scores(k, scores, EVEN, k.problem.right_tiles, k.problem.rope_tiles)
    (scores,) = k.seams.finish_products(0, scores)
    return scores


def _next_even_scores(k: Context, state: RowState, round_: Any) -> tuple[RowState, Any]:
    """Starts the next pair's scores behind the values that are still being added up."""
    _wait_for_keys(k, EVEN, LEFT, round_)
    scores = _start_scores(k, None, EVEN, k.problem.left_tiles)
    k.seams.finish_products(1)  # the values, not the scores
    _free(k, ODD, LEFT)
    _wait_for_keys(k, EVEN, RIGHT, round_)
    scores = _start_scores(k, scores, EVEN, k.problem.right_tiles, k.problem.rope_tiles)
    acc, scores = k.seams.finish_products(0, state.acc, scores)
    return state._replace(acc=acc), scores


def _even_pair(
    k: Context, state: RowState, scores: Register, scale: Register, round_: Any
) -> RowState:
    """One pair of blocks; leaves the product with the odd block's values running."""
    logits = _masked_logits(k, scores, EVEN, scale)
    state, factor, moved = softmax.move_reference(k, state, logits.max(axis=1))
    state = state._replace(acc=softmax.rescaled(state.acc, factor, moved))
    weights, rounded = softmax.weights_of(logits, state.reference)

    state = _start_own_values(k, state, rounded, EVEN, LEFT)
    _hand_over(k, EVEN, state.reference, rounded)
    state = state._replace(total=state.total + k.seams.row_partial_sums(weights))
    state = _finish_values(k, state)
    _free(k, EVEN, LEFT)

    k.seams.wait(k.smem.barriers, weights_ready[ODD], round_)
    state = softmax.adopt_reference(k, state, _handed_over_reference(k, ODD))
    return _start_other_values(k, state, ODD, LEFT)


def odd_consumer(k: Context) -> None:
    """Scores odd blocks and owns the right half of the output."""
    plgpu.set_max_registers(k.config.consumer_registers, action="increase")
    scale = k.gmem.scale[0]

    def compute_tile(own: OwnTile, rounds: Any) -> Any:
        sink = load_sink(k, own.tile)

        def pair(p: Any, state: RowState) -> RowState:
            is_last = p == own.num_pairs - 1

            @pl.when(p == 0)
            def _wait_for_queries() -> None:
                for side in SIDES:
                    plgpu.barrier_wait(k.smem.q_ready.at[side])

            def load_next_queries() -> None:
                pl.when(is_last & own.has_following)(lambda: load_queries(k, own.following))

            def post_if_last(state: RowState) -> None:
                pl.when(is_last)(lambda: post_totals(k, ODD, state))

            return _odd_pair(k, state, scale, rounds + p, load_next_queries, post_if_last)

        state = lax.fori_loop(0, own.num_pairs, pair, softmax.initial_state(keeps_maximum=True))
        finish_tile(k, ODD, own, state, sink)
        return rounds + own.num_pairs

    k.for_own_tiles(compute_tile, I32(0))


def _odd_pair(
    k: Context,
    state: RowState,
    scale: Register,
    round_: Any,
    after_last_scores: Callable[[], None],
    after_totals: Callable[[RowState], None],
) -> RowState:
    """One pair of blocks.

    after_last_scores: called where neither consumer will read Q for this pair any more.
    after_totals: called as soon as maximum and total of this pair are known.
    """
    _wait_for_keys(k, ODD, LEFT, round_)
    scores = _start_scores(k, None, ODD, k.problem.left_tiles, k.problem.rope_tiles)
    _wait_for_keys(k, ODD, RIGHT, round_)
    scores = _start_scores(k, scores, ODD, k.problem.right_tiles)
    (scores,) = k.seams.finish_products(0, scores)

    # The even block's weights stand for the end of the even consumer's reads of Q, too.
    k.seams.wait(k.smem.barriers, weights_ready[EVEN], round_)
    after_last_scores()
    state = softmax.adopt_reference(k, state, _handed_over_reference(k, EVEN))
    state = _start_other_values(k, state, EVEN, RIGHT)

    # The softmax of the own block, while the tensor core is at work.
    logits = _masked_logits(k, scores, ODD, scale)
    state, factor, moved = softmax.move_reference(k, state, logits.max(axis=1))
    weights, rounded = softmax.weights_of(logits, state.reference)
    state = state._replace(total=state.total + k.seams.row_partial_sums(weights))
    _hand_over(k, ODD, state.reference, rounded)
    after_totals(state)
    state = _finish_values(k, state)
    _free(k, EVEN, RIGHT)

    state = state._replace(acc=softmax.rescaled(state.acc, factor, moved))
    state = _start_own_values(k, state, rounded, ODD, RIGHT)
    state = _finish_values(k, state)
    _free(k, ODD, RIGHT)
    return state
