"""The two consumers. Each scores every other key block and owns half of the output columns.

Order of events for a pair of blocks (0 = even, 1 = odd; L, R = columns 0-255, 256-511):

    even consumer                           odd consumer
    softmax of S0                           S1 = Q K1^T, and behind it,
    O_L += P0 V0_L, hands P0 over           once P0 is there, O_R += P0 V0_R
    waits for P1                            meanwhile softmax of S1, hands P1 over
    O_L += P1 V1_L                          O_R += P1 V1_R
    next S0 = Q K0^T

Both multiply the same weights, taken from their own registers or, the other's, from shared
memory. The reference maximum is handed over with them, so both end a pair with the same one.
A chunk of a slot is given back as soon as its one product with weights is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.decode.kernel_sm90.epilogue import finish_item, post_totals, write_rows_without_keys
from jax_impl.decode.kernel_sm90.kernel import (
    I32,
    REFERENCE,
    ROPE_CHUNK,
    Context,
    Item,
    weights_ready,
)
from jax_impl.decode.kernel_sm90.problem import CHUNKS, D, chunks_of
from jax_impl.mosaic import online_softmax as softmax
from jax_impl.mosaic.blocks import (
    BLOCK_KEYS,
    EVEN,
    LEFT,
    ODD,
    PAIR_KEYS,
    RIGHT,
    SIDE_COLUMNS,
    TILE_ROWS,
)
from jax_impl.mosaic.layouts import MATRIX, Register
from jax_impl.mosaic.online_softmax import RowState, over_columns

ALL_CHUNKS = (*range(CHUNKS), ROPE_CHUNK)
_PRODUCTS = len(chunks_of(LEFT))  # groups that the values of a block are started in


def load_queries(k: Context, item: Item) -> None:
    """Starts the copy of an item's queries; rows past the last one arrive as zeros."""
    rows = pl.ds(item.first_row, TILE_ROWS)
    parts = (pl.ds(0, SIDE_COLUMNS), pl.ds(SIDE_COLUMNS, D - SIDE_COLUMNS))
    for place, columns in zip(k.smem.q, parts, strict=True):
        plgpu.copy_gmem_to_smem(k.gmem.q.at[rows, columns], place, k.smem.q_ready)


def _load_row_keys(k: Context, item: Item, parity: int) -> None:
    """Keeps what each row sees where the mask finds it: registers are for the accumulator."""
    row_keys = k.seams.load_row_keys(k.gmem.row_keys, item.first_row, k.problem)
    row_keys = jnp.minimum(row_keys, k.problem.most_keys)
    k.seams.put_rows(k.smem.row_keys.at[parity], row_keys)


def _wait_for(k: Context, chunk: int, slot: int) -> None:
    plgpu.barrier_wait(k.smem.kv_ready[chunk].at[slot])


def _free(k: Context, chunk: int, slot: int) -> None:
    plgpu.barrier_arrive(k.smem.kv_free[chunk].at[slot])


def _start_scores(k: Context, scores: Register, slot: int, *chunks: int) -> Any:
    """Q K^T over some chunks as they arrive, on top of `scores` (None: from zero)."""
    for chunk in chunks:
        _wait_for(k, chunk, slot)
        scores = k.seams.start_scores(scores, k.smem.q, k.smem.keys[chunk].at[slot], chunk)
    return scores


def _clear_values_behind(k: Context, item: Item, slot: int, side: int, first_key: Any) -> None:
    """Zeroes the values of keys behind the last one: they may be NaN, and 0 * NaN is NaN."""

    @pl.when(first_key + BLOCK_KEYS > item.end)
    def _clear() -> None:
        for chunk in chunks_of(side):
            k.seams.clear_rows_from(k.smem.chunks[chunk].at[slot], item.end - first_key)
        plgpu.commit_smem()


def _values(k: Context, slot: int, side: int) -> list[Any]:
    return [k.smem.chunks[chunk].at[slot] for chunk in chunks_of(side)]


def _start_own_values(
    k: Context, state: RowState, weights: Register, slot: int, side: int
) -> RowState:
    """acc += weights from registers times this side's values of a slot, a group per chunk."""
    acc = k.seams.start_values_of_registers(state.acc, weights, *_values(k, slot, side))
    return state._replace(acc=acc)


def _start_other_values(k: Context, state: RowState, slot: int, side: int) -> RowState:
    """acc += weights of a block that the other consumer has handed over."""
    weights = k.smem.rope.at[slot]
    acc = k.seams.start_values_of_smem(state.acc, weights, *_values(k, slot, side))
    return state._replace(acc=acc)


def _finish_values(k: Context, state: RowState, slot: int, side: int, behind: int = 0) -> RowState:
    """Gives back each chunk after its product; `behind`: newer groups that may go on."""
    chunks = chunks_of(side)
    for number, chunk in enumerate(chunks):
        in_flight = behind + len(chunks) - 1 - number
        if in_flight:
            k.seams.finish_products(in_flight)
        else:
            (acc,) = k.seams.finish_products(0, state.acc)
            state = state._replace(acc=acc)
        _free(k, chunk, slot)
    return state


def _hand_over(k: Context, parity: int, reference: Register, weights: Register) -> None:
    k.seams.store_weights(k.smem.rope.at[parity], weights)
    k.seams.put_rows(k.smem.mailbox.at[REFERENCE[parity]], reference)
    k.seams.arrive(k.smem.handover, weights_ready[parity], before_products=True)


def _wait_for_weights(k: Context, parity: int, round_: Any) -> Any:
    """The other consumer's reference, once its weights are there."""
    k.seams.wait(k.smem.handover, weights_ready[parity], round_)
    return k.seams.get_rows(k.smem.mailbox.at[REFERENCE[parity]])


def _masked_scores(k: Context, scores: Register, item: Item, parity: int, first_key: Any) -> Any:
    """A block's scores, -inf at the keys that a row doesn't see.

    Only the last blocks of an item need it. The keys that a row sees are the first ones, so
    one number per row says all that rank, world, interleave and causality have to say.
    """

    def mask(scores: Register) -> Any:
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX) + first_key
        row_keys = k.seams.get_rows(k.smem.row_keys.at[parity])
        # A select: the score of a key that is not seen may be NaN.
        return jnp.where(key < over_columns(row_keys, scores), scores, -jnp.inf)

    return lax.cond(first_key + BLOCK_KEYS > item.full, mask, lambda scores: scores, scores)


def even_consumer(k: Context) -> None:
    """Scores even blocks and owns the left half of the output."""
    plgpu.set_max_registers(k.registers[0], action="increase")
    first, last = k.first, k.last
    pl.when(first < last)(lambda: load_queries(k, k.item(first)))
    scale = k.gmem.scales[0]

    def compute_item(number: Any, rounds: Any) -> Any:
        item = k.item(number)
        _load_row_keys(k, item, EVEN)
        plgpu.barrier_wait(k.smem.q_ready)
        scores = _start_scores(k, None, EVEN, *ALL_CHUNKS)
        (scores,) = k.seams.finish_products(0, scores)

        def middle(p: Any, carry: Any) -> Any:
            state, scores = carry
            state = _even_pair(k, item, p, state, scores, scale, rounds + p)
            return _next_even_scores(k, state)

        carry = (softmax.initial_state(keeps_maximum=False), scores)
        state, scores = lax.fori_loop(0, item.num_pairs - 1, middle, carry)
        p = item.num_pairs - 1
        state = _even_pair(k, item, p, state, scores, scale, rounds + p)
        state = _finish_values(k, state, ODD, LEFT)

        post_totals(k, EVEN, state)
        finish_item(k, EVEN, item, number - first, state)
        return rounds + item.num_pairs

    lax.fori_loop(first, last, compute_item, I32(0))
    write_rows_without_keys(k, LEFT)


def _next_even_scores(k: Context, state: RowState) -> tuple[RowState, Any]:
    """The next pair's scores, started behind the values that are still being added up."""
    early = chunks_of(LEFT) if k.config.scores_behind_values else ()
    scores = _start_scores(k, None, EVEN, *early) if early else None
    state = _finish_values(k, state, ODD, LEFT, behind=len(early))
    scores = _start_scores(k, scores, EVEN, *ALL_CHUNKS[len(early) :])
    acc, scores = k.seams.finish_products(0, state.acc, scores)
    return state._replace(acc=acc), scores


def _even_pair(
    k: Context, item: Item, p: Any, state: RowState, scores: Register, scale: Register, round_: Any
) -> RowState:
    """One pair of blocks; leaves the product with the odd block's values running."""
    first_key = (item.first_pair + p) * PAIR_KEYS
    scores = _masked_scores(k, scores, item, EVEN, first_key)
    state, factor, moved = softmax.move_reference(k, state, scores.max(axis=1) * scale)
    state = state._replace(acc=softmax.rescaled(state.acc, factor, moved))
    weights, rounded = softmax.weights_of(scores * scale, state.reference)

    _clear_values_behind(k, item, EVEN, LEFT, first_key)
    state = _start_own_values(k, state, rounded, EVEN, LEFT)
    _hand_over(k, EVEN, state.reference, rounded)
    state = state._replace(total=state.total + k.seams.row_partial_sums(weights))
    state = _finish_values(k, state, EVEN, LEFT)

    reference = _wait_for_weights(k, ODD, round_)
    state = softmax.adopt_reference(k, state, reference)
    for chunk in chunks_of(LEFT):
        _wait_for(k, chunk, ODD)
    _clear_values_behind(k, item, ODD, LEFT, first_key + BLOCK_KEYS)
    return _start_other_values(k, state, ODD, LEFT)


def odd_consumer(k: Context) -> None:
    """Scores odd blocks and owns the right half of the output."""
    plgpu.set_max_registers(k.registers[0], action="increase")
    scale = k.gmem.scales[0]
    first, last = k.first, k.last

    def compute_item(number: Any, rounds: Any) -> Any:
        item = k.item(number)
        _load_row_keys(k, item, ODD)
        plgpu.barrier_wait(k.smem.q_ready)

        def pair(p: Any, state: RowState) -> RowState:
            is_last = p == item.num_pairs - 1

            def load_next_queries() -> None:
                has_next = number + 1 < last
                pl.when(is_last & has_next)(lambda: load_queries(k, k.item(number + 1)))

            def post_if_last(state: RowState) -> None:
                pl.when(is_last)(lambda: post_totals(k, ODD, state))

            return _odd_pair(k, item, p, state, scale, rounds + p, load_next_queries, post_if_last)

        state = lax.fori_loop(0, item.num_pairs, pair, softmax.initial_state(keeps_maximum=False))
        finish_item(k, ODD, item, number - first, state)
        return rounds + item.num_pairs

    lax.fori_loop(first, last, compute_item, I32(0))
    write_rows_without_keys(k, RIGHT)


def _odd_pair(
    k: Context,
    item: Item,
    p: Any,
    state: RowState,
    scale: Register,
    round_: Any,
    after_last_scores: Callable[[], None],
    after_totals: Callable[[RowState], None],
) -> RowState:
    """One pair of blocks.

    after_last_scores: called where neither consumer will read Q for this pair any more.
    after_totals: called as soon as reference and total of this pair are known.
    """
    first_key = (item.first_pair + p) * PAIR_KEYS
    scores = _start_scores(k, None, ODD, *ALL_CHUNKS)

    # The even block's values queue behind the scores: the tensor core works while this
    # warpgroup is at its softmax.
    reference = _wait_for_weights(k, EVEN, round_)
    state = softmax.adopt_reference(k, state, reference)
    for chunk in chunks_of(RIGHT):
        _wait_for(k, chunk, EVEN)
    _clear_values_behind(k, item, EVEN, RIGHT, first_key)
    state = _start_other_values(k, state, EVEN, RIGHT)
    (scores,) = k.seams.finish_products(_PRODUCTS, scores)
    # The even block's weights stand for the end of the even consumer's reads of Q, too.
    after_last_scores()

    scores = _masked_scores(k, scores, item, ODD, first_key + BLOCK_KEYS)
    state, factor, moved = softmax.move_reference(k, state, scores.max(axis=1) * scale)
    weights, rounded = softmax.weights_of(scores * scale, state.reference)
    state = state._replace(total=state.total + k.seams.row_partial_sums(weights))
    _hand_over(k, ODD, state.reference, rounded)
    after_totals(state)
    state = _finish_values(k, state, EVEN, RIGHT)

    state = state._replace(acc=softmax.rescaled(state.acc, factor, moved))
    _clear_values_behind(k, item, ODD, RIGHT, first_key + BLOCK_KEYS)
    state = _start_own_values(k, state, rounded, ODD, RIGHT)
    return _finish_values(k, state, ODD, RIGHT)
