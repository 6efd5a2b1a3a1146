"""The barriers of the kernel, each called after what it announces.

kv_ready[slot][side]   the producer has filled these columns of a slot; the left one also
                       announces the slot's mask
kv_free[slot][side]    the consumer of this side has read its values out of the slot
weights_ready[parity]  the weights of the even (odd) block and their reference maximum are in
                       shared memory
totals_ready[parity]   the even (odd) consumer's sums of a whole tile are in shared memory

The score columns of a slot, the mask and the mailboxes have no barrier of their own: whoever
frees a slot has read them, or has waited for weights that were made from them.
"""

from __future__ import annotations

from jax_impl.prefill.sparse.kernel_sm90.problem import EVEN, LEFT, ODD, SIDES

SLOTS = (EVEN, ODD)

kv_ready = ((0, 1), (2, 3))
kv_free = ((4, 5), (6, 7))
weights_ready = (8, 9)
totals_ready = (10, 11)

COUNT = 12


def arrivals_per_thread(*, paged: bool) -> tuple[int, ...]:
    """How many times each of the 128 threads of a warpgroup arrives per phase, by barrier.

    A left column group is announced twice: once with its mask, and once when its columns are
    there. With pages so is a right one: once with what has been widened, and once when the rest
    has been copied.
    """
    twice = {kv_ready[slot][side] for slot in SLOTS for side in (SIDES if paged else (LEFT,))}
    return tuple(2 if barrier in twice else 1 for barrier in range(COUNT))


assert len({b for pair in (*kv_ready, *kv_free) for b in pair}) == len(SLOTS) * len(SIDES) * 2
assert (EVEN, ODD) == (0, 1)
