"""What the V4 prefill path returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float32, Int32

    from jax_impl.planning import PrefillChunk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkStage:
    """What one chunk of requests [s, e) with t tokens had before its attention.

    workspace: [e - s, M, 512] bfloat16; columns [0, N) of a request are compressed entries,
      columns from N on the positions that it gathered. What nothing was gathered into is undefined.
    indices: [t, C] int32, rows of the workspace seen as [(e - s) * M, 512].
    lengths: [t] int32, how many of them each token takes.
    """

    workspace: BFloat16[Array, "r M 512"]
    indices: Int32[Array, "t C"]
    lengths: Int32[Array, " t"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class V4PrefillResult:
    """Output and softmax statistics of every (token, head) row, and how they came about.

    out, max_logits, lse: as `SparsePrefillResult` has them.
    plan: the chunks that ran, each in its own workspace and its own launch; None where all
      requests went through one launch that needs neither (fused, without a plan given).
    stages: one for each chunk of the plan, or None where they weren't kept.
    """

    out: BFloat16[Array, "T H 512"]
    max_logits: Float32[Array, "T H"]
    lse: Float32[Array, "T H"]
    plan: tuple[PrefillChunk, ...] | None = dataclasses.field(metadata={"static": True})
    stages: tuple[ChunkStage, ...] | None
