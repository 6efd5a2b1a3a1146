"""What an implementation is given: the arguments of one call, made from a case.

Arrays are NumPy (bfloat16 through ml_dtypes) and may be non-contiguous views where the case says
so.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from compare.cases.case import Case


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SparsePrefillInputs:
    """Arguments of one sparse prefill call; spec: FlashMLA's flash_mla_sparse_fwd.

    q [T, H, D] bfloat16. kv [S, D] bfloat16 (one latent head, V is its first 512 columns).
    indices [T, K] int32; a value outside [0, S) is an invalid slot. sm_scale float, natural units.
    d_v 512. attn_sink [H] float32 natural-log units, or None. topk_length [T] int32, or None.
    chunks: query ranges (start, end) executed one after the other over the same kv, or None for
    one call.
    case: where the inputs came from; None for a caller's own tensors.
    """

    q: np.ndarray
    kv: np.ndarray
    indices: np.ndarray
    sm_scale: float
    d_v: int = 512
    attn_sink: np.ndarray | None = None
    topk_length: np.ndarray | None = None
    chunks: tuple[tuple[int, int], ...] | None = None
    case: Case | None = None

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
            array = getattr(self, name)
            if array is None:
                digest.update(f" {name}=none".encode())
                continue
            digest.update(f" {name}:{array.dtype.name}{list(array.shape)}".encode())
            for block in range(0, len(array), 256):
                digest.update(np.ascontiguousarray(array[block : block + 256]).view(np.uint8))
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlanInputs:
    """Arguments of a chunk planner, all lengths in tokens; names as in plan_prefill_chunks."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    compress_ratio: int
    window: int
    max_model_len: int
    max_num_batched_tokens: int
    chunk_size: int
    has_compressed: bool | None = None
    case: Case | None = None

    def sha256(self) -> str:
        """Hash of every argument."""
        fields = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "case"
        }
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()


Inputs = SparsePrefillInputs | PrefillPlanInputs
