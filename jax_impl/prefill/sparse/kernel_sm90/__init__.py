"""Sparse MLA prefill as a Pallas Mosaic GPU kernel for Hopper.

Algorithm. Persistent thread blocks, one per SM, walk over tiles of 64 heads of one token. Three
warpgroups: a producer gathers blocks of 64 keys into two slots of shared memory; two consumers
each score every other block, exchange their softmax weights, and each accumulate one half of
the 512 output columns over all blocks (consumers.py has the order of events). The online
softmax works in base 2 and moves its reference maximum only when a row has outgrown it by
2**growth_limit (mosaic/online_softmax.py).

Contract. `launch.attend`: q [T, H, D] and kv [S, D] bfloat16, D 512 or 576, H at most 128,
indices [T, K] int32 of any width, T >= 1; scale >= 0. Special values as in
`jax_impl.sparse_prefill`. `launch.attend_into` does it for some tokens of a batch, in place.
Scores are sums of bfloat16 products in float32, weights are rounded to bfloat16 for the product
with the values and not for their sum. Each row's bits depend on its own query, list and length
alone: not on the other heads of its tile, on the batch, or on num_ctas. exp2 and the reciprocal
are the hardware's approximations.

Cost. 2 T H K (D + 512) FLOP. Per block and tile, 72 KB (D 512: 64 KB) pass through L2 into a slot
of the SM while its tensor cores, at 4096 FLOP a cycle, are busy for 2 * 64 * 64 * (D + 512) / 4096
cycles; a slot can be refilled only between its last use as values and its next use as keys, and
shared memory holds no third one. Large S is bound by that refill, small K by the end of each tile.

With pages (`launch.attend_pages`) the keys lie in one or two paged caches of 584-byte FP8 tokens,
D is 512, and paged_producer.py takes the gather's place: it widens keys in its registers, and
leaves in shared memory what a gather from a bfloat16 workspace would have, so that the result
has the bits of gathering and attending. A key is 584 bytes through L2 instead of 1024, and costs
the producer about 2.5 instructions for each float8 code that a thread widens.

What it does not do: other head widths, a key/value split, T = 0, splitting the keys of one token
over thread blocks (a handful of tokens can't fill the GPU), any GPU but Hopper.
A row whose every base-2 logit lies under -1e30 counts as empty, as in FlashMLA's kernel.

Rooms: launch.py (padding, entry) gives kernel.py (memory, barriers, context, body) its roles,
producer.py or paged_producer.py and consumers.py -> epilogue.py; problem.py and config.py are
extents and tuning. What only hardware does is in seams_cuda/, and once more, for Pallas'
interpreter, in seams_interpret.py. What decode has as well is in jax_impl/mosaic.
"""

from jax_impl.prefill.sparse.kernel_sm90.config import Config, PagedConfig
from jax_impl.prefill.sparse.kernel_sm90.launch import (
    attend,
    attend_into,
    attend_pages,
    attend_pages_into,
)
from jax_impl.prefill.sparse.kernel_sm90.problem import Pages

__all__ = [
    "Config",
    "PagedConfig",
    "Pages",
    "attend",
    "attend_into",
    "attend_pages",
    "attend_pages_into",
]
