"""DCP causal MLA decode as a Pallas Mosaic GPU kernel for Hopper.

Algorithm. Persistent thread blocks (or clusters of two) walk over items that a plan has dealt
them: 64 rows, token-major (token, head) pairs of one request, over a run of its key blocks. A
producer brings blocks of 64 keys into two slots of shared memory; two consumers each score every
other block, exchange their softmax weights, and each accumulate one half of the 512 output
columns (consumers.py has the order of events). Unfinished results are merged in float32 by a
second launch (merging.py).

Contract. `launch.attend`: q [N, H, 576] bfloat16 or float8_e4m3fn, kv_cache [pages, P, 576]
likewise, P 32, 64 or 128, a plan of `plan_decode` for exactly these N rows; scales >= 0. Special
values as in `jax_impl.dcp_decode`. Scores are sums of bfloat16 products in float32, weights are
rounded to bfloat16 for the product with the values and not for their sum. Each row's bits depend
on its own query, its own keys and where the plan has cut them. exp2, log and the reciprocal are
the hardware's approximations.

Cost. 2 N H keys (576 + 512) FLOP; keys are read once per request and pair of tiles. A slot of
72 KB can be refilled only between its last use as values and its next use as keys, and shared
memory holds no third one.

What it does not do: other widths, windows, sinks, any GPU but Hopper.

Rooms: launch.py (layout, entry) gives kernel.py (memory, barriers, context, body) its roles,
producer.py and consumers.py -> epilogue.py; merging.py is the second launch; problem.py and
config.py are extents and tuning; work.py is what planner and kernel agree on. What only hardware
does is in seams_cuda, and once more, for Pallas' interpreter, in seams_interpret.py. What prefill
has as well is in jax_impl/mosaic.
"""

from jax_impl.decode.kernel_sm90.config import Config
from jax_impl.decode.kernel_sm90.launch import attend

__all__ = ["Config", "attend"]
