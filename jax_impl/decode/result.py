"""What decode and merging return, on every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxtyping import Float, Float32


class DecodeResult(NamedTuple):
    """Output and log-sum-exp of every (token, head) row, over the keys of one rank or of all.

    out: attention output, normalised over the keys that were seen.
    lse: natural-log sum of exp over the row's logits, float32.

    A row that sees no key has out 0 and lse -inf: it weighs nothing in a merge. (FlashMLA says
    +inf for such a row; `merge_states` takes either.)
    """

    out: Float[Any, "T H 512"]
    lse: Float32[Any, "T H"]
