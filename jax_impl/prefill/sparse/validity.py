"""The one rule that says whether a slot of an index list names a key.

Every backend asks this function: on whole arrays in plain jax.numpy and under Pallas'
interpreter, on the registers of one thread in the Hopper kernel. It is written with operators
alone so that it means the same thing on all of them.
"""

from __future__ import annotations

from typing import Any


def key_is_valid(index: Any, slot: Any, num_kv: int, length: Any) -> Any:
    """Whether `index`, standing at position `slot` of its row, takes part in the softmax.

    Valid means 0 <= index < num_kv and slot < length, so any negative index and any index
    past the end is a hole, wherever in the row it stands. Duplicates stay: each occurrence
    counts. A length of 0 or less empties the row. (FlashMLA, producer warpgroup of the SM90
    sparse prefill kernel.)

    Arguments are int32 scalars or arrays that broadcast together; the result is boolean.
    """
    return (index >= 0) & (index < num_kv) & (slot < length)
