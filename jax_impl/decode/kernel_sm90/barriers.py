"""The barriers of the kernel, each called after what it announces.

Of Pallas, since TMA copies complete them (context.py, Smem):

    q_ready             the queries of an item are in shared memory
    kv_ready[c][slot]   chunk c of a slot is filled; chunk ROPE_CHUNK is the rotary columns
    kv_free[c][slot]    the consumer that owns the output columns of chunk c has read its values,
                        in every thread block that the copies go to

By hand, waited for by phase number:

    weights_ready[parity]  the weights of the even (odd) block and their reference maximum are
                           in shared memory
    totals_ready[parity]   the even (odd) consumer's sums of a whole item are in shared memory

The rotary columns of a slot and the mailboxes have no barrier of their own: whoever frees a slot
has read them, or has waited for weights that were made from them.
"""

from __future__ import annotations

from jax_impl.decode.kernel_sm90.problem import CHUNKS, EVEN, LEFT, ODD, RIGHT, chunks_of

ROPE_CHUNK = CHUNKS

weights_ready = (0, 1)
totals_ready = (2, 3)

COUNT = 4

# The chunk whose giving back stands for the rotary columns as well: a block's weights take
# their place, and the other consumer reads those, its last chunk's product last.
ROPE_FREED_WITH = {EVEN: chunks_of(RIGHT)[-1], ODD: chunks_of(LEFT)[-1]}
