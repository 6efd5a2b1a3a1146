"""How both attention kernels cut their work: 64 rows, blocks of 64 keys, two consumers.

The even consumer scores the even blocks and owns the left half of the output's columns, the odd
one the odd blocks and the right half. JAX-free, as planners need some of it.
"""

from __future__ import annotations

TILE_ROWS = 64  # rows of a tensor-core accumulator
BLOCK_KEYS = 64  # keys that one slot of shared memory holds
PAIR_KEYS = 2 * BLOCK_KEYS  # an even block for one consumer, an odd one for the other
D_V = 512
SIDE_COLUMNS = D_V // 2  # output columns of one consumer

LEFT, RIGHT = 0, 1
SIDES = (LEFT, RIGHT)
EVEN, ODD = 0, 1
SLOTS = (EVEN, ODD)
