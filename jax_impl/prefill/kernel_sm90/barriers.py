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

from jax_impl.prefill.kernel_sm90.problem import EVEN, LEFT, ODD, SIDES

SLOTS = (EVEN, ODD)

kv_ready = ((0, 1), (2, 3))
kv_free = ((4, 5), (6, 7))
weights_ready = (8, 9)
totals_ready = (10, 11)

COUNT = 12

# How many times each of the 128 threads of a warpgroup arrives per phase. A left column group
# is announced twice: once with its mask, and once when its copies have landed.
ARRIVALS_PER_THREAD = tuple(
    2 if any(barrier == kv_ready[slot][LEFT] for slot in SLOTS) else 1 for barrier in range(COUNT)
)

assert len({b for pair in (*kv_ready, *kv_free) for b in pair}) == len(SLOTS) * len(SIDES) * 2
assert (EVEN, ODD) == (0, 1)
