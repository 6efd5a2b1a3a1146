"""What sparse prefill returns, on every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float32


class SparsePrefillResult(NamedTuple):
    """Output and softmax statistics of every (token, head) row.

    out: attention output, bfloat16; the only one that the sink changes.
    max_logits: largest scaled logit of the row, float32, natural units.
    lse: natural-log sum of exp over the row's logits, float32, the sink left out.

    A row without a valid key has out 0, max_logits -inf and lse +inf (FlashMLA's sentinel
    for "empty", not a large sum).
    """

    out: BFloat16[Array, "T H 512"]
    max_logits: Float32[Array, "T H"]
    lse: Float32[Array, "T H"]


def result_of_no_tokens(num_heads: int, d_v: int) -> SparsePrefillResult:
    """The result for T = 0, for which no backend launches anything."""
    return SparsePrefillResult(
        out=jnp.zeros((0, num_heads, d_v), jnp.bfloat16),
        max_logits=jnp.zeros((0, num_heads), jnp.float32),
        lse=jnp.zeros((0, num_heads), jnp.float32),
    )
