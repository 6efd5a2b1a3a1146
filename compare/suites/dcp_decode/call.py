"""One decode call: what an implementation is given and what it gives back."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from compare.protocol.hashing import add_array
from compare.protocol.inputs import Inputs, Result


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DcpDecodeInputs(Inputs):
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


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DcpDecodeResult(Result):
    """One decode result at the judge's border: of one rank, or of all ranks merged.

    out [T, H, 512] bfloat16 (float32 where it is still to be merged); or, where out_rows is given,
    [R, 512]: only the (token, head) rows out_rows[i] = token * H + head. lse [T, H] float32,
    natural-log, empty -inf. T counts padded rows too: out 0, lse -inf there.
    parts: one of PARTS: in what dtype results over parts of the keys stood before they were merged,
    "float32" or "bfloat16": the ranks' results, or those of ranges of keys that a kernel splits a
    request into; "bfloat16 twice" where both are.
    """

    out: np.ndarray
    lse: np.ndarray
    out_rows: np.ndarray | None = None
    parts: str = "float32"
