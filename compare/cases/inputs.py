"""What an implementation is given: the arguments of one call, made from a case.

Arrays are NumPy (bfloat16 through ml_dtypes) and may be non-contiguous views where the case says
so.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from compare.cases.case import Case
from compare.cases.hashing import add_array
from compare.cases.v4_inputs import V4PrefillInputs, V4StagesInputs


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
            add_array(digest, name, getattr(self, name))
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
        return _hash_of_numbers(self)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DcpDecodeInputs:
    """Arguments of one rank's call of DCP causal MLA decode; names as in torch_ref.dcp_decode.

    q [T, H, 576] bfloat16 or float8_e4m3fn; rows from query_start_loc[-1] on are padding.
    kv_cache [pages, P, 576] likewise (V is the first 512 columns). block_table [B, max_pages]
    int32: local
    key k of request b is row k % P of page block_table[b, k // P]; entries past a request's keys
    are anything. seq_lens [B] int32: keys on this rank. query_start_loc [B + 1] int32.
    total_lens [B] int32: keys on all ranks together, this step's tokens included.
    max_query_len: the query length that the engine promises for every request.
    sm_scale float, natural units. kv_scale, q_scale: what a stored float8 number of kv_cache or q
    is multiplied by; None for bfloat16.
    shards: None, or one call for each rank whose results are to be merged; the other fields are
    then those of the one call over all keys (dcp_world 1), whose result the merge must be.
    case: where the inputs came from; None for a caller's own tensors.
    """

    q: np.ndarray
    kv_cache: np.ndarray
    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    total_lens: np.ndarray
    max_query_len: int
    sm_scale: float
    dcp_rank: int = 0
    dcp_world: int = 1
    interleave: int = 1
    causal: bool = True
    kv_scale: float | None = None
    q_scale: float | None = None
    shards: tuple[DcpDecodeInputs, ...] | None = None
    case: Case | None = None

    def sha256(self) -> str:
        """Hash of names, dtypes, shapes and values of every argument, those of the shards too."""
        digest = hashlib.sha256()
        scale = "none" if self.kv_scale is None else float(self.kv_scale).hex()
        digest.update(
            f"sm_scale={float(self.sm_scale).hex()} kv_scale={scale} "
            f"max_query_len={self.max_query_len} dcp={self.dcp_rank}/{self.dcp_world} "
            f"interleave={self.interleave} causal={int(self.causal)}".encode()
        )
        if self.q_scale is not None:  # recorded hashes are of inputs without one
            digest.update(f" q_scale={float(self.q_scale).hex()}".encode())
        for name in _DECODE_ARRAYS:
            add_array(digest, name, getattr(self, name))
        for shard in self.shards or ():
            digest.update(shard.sha256().encode())
        return digest.hexdigest()


_DECODE_ARRAYS = ("q", "kv_cache", "block_table", "seq_lens", "query_start_loc", "total_lens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlanInputs:
    """Arguments of a planner of decode rows, in tokens; names as in decode_rows and
    local_key_counts. num_rows: rows of q, padding included. max_query_len: the promised bound.
    """

    query_start_loc: tuple[int, ...]
    total_lens: tuple[int, ...]
    max_query_len: int
    causal: bool
    num_rows: int
    dcp_rank: int
    dcp_world: int
    interleave: int
    case: Case | None = None

    def sha256(self) -> str:
        """Hash of every argument."""
        return _hash_of_numbers(self)


Inputs = (
    SparsePrefillInputs
    | PrefillPlanInputs
    | DcpDecodeInputs
    | DecodePlanInputs
    | V4PrefillInputs
    | V4StagesInputs
)


def _hash_of_numbers(inputs: PrefillPlanInputs | DecodePlanInputs) -> str:
    fields = {
        f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if f.name != "case"
    }
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()
