"""One sparse attention call over plain keys: what it is given and what it gives back.

The suite sparse-prefill is judged as such a call, and so is the attention of the V4 path.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from compare.protocol.hashing import add_array
from compare.protocol.inputs import Inputs, Result


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SparsePrefillInputs(Inputs):
    """Arguments of one sparse prefill call; spec: FlashMLA's flash_mla_sparse_fwd.

    q [T, H, D] bfloat16. kv [S, D] bfloat16 (one latent head, V is its first 512 columns).
    indices [T, K] int32; a value outside [0, S) is an invalid slot. sm_scale float, natural units.
    d_v 512. attn_sink [H] float32 natural-log units, or None. topk_length [T] int32, or None.
    chunks: query ranges (start, end) executed one after the other over the same kv, or None for
    one call.
    """

    q: np.ndarray
    kv: np.ndarray
    indices: np.ndarray
    sm_scale: float
    d_v: int = 512
    attn_sink: np.ndarray | None = None
    topk_length: np.ndarray | None = None
    chunks: tuple[tuple[int, int], ...] | None = None

    def rows(self, start: int, end: int) -> SparsePrefillInputs:
        """The same call for the tokens [start, end) only: views, nothing is copied."""
        lengths = None if self.topk_length is None else self.topk_length[start:end]
        return dataclasses.replace(
            self,
            q=self.q[start:end],
            indices=self.indices[start:end],
            topk_length=lengths,
            chunks=None,
        )

    def sha256(self) -> str:
        """Hash of names, dtypes, shapes and values (strides don't count) of every argument."""
        digest = hashlib.sha256()
        digest.update(f"sm_scale={float(self.sm_scale).hex()} d_v={self.d_v}".encode())
        for name in ("q", "kv", "indices", "attn_sink", "topk_length"):
            add_array(digest, name, getattr(self, name))
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SparsePrefillResult(Result):
    """One sparse prefill result at the judge's border.

    out [T, H, 512] bfloat16; or, where out_rows is given, [R, 512]: only the (token, head) rows
    out_rows[i] = token * H + head (recorded results hold some of the rows).
    max_logits [T, H] float32, natural units, or None: not compared. lse [T, H] float32, natural-
    log, empty +inf.
    Arrays may be memory-mapped; the judge reads them in blocks of rows.
    """

    out: np.ndarray
    lse: np.ndarray
    max_logits: np.ndarray | None = None
    out_rows: np.ndarray | None = None


PARTS = ("float32", "bfloat16", "bfloat16 twice")
"""The dtype of parts of a result before they were merged, by how often they were rounded."""
