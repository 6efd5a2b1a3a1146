"""One call of sparse attention on a DCP rank: what an implementation is given and gives back."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from compare.protocol.hashing import add_array
from compare.protocol.inputs import Inputs, Result


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DcpSparseInputs(Inputs):
    """Arguments of one rank's call.

    q [T, H, 512] bfloat16. kv_cache [pages, P, 512] bfloat16, key and value in one. block_table
    [B, max_pages] int32: local key k of request b is row k % P of page block_table[b, k // P].
    token_to_request [T] int32. topk_positions [T, K] int32: the global positions that a token
    chose, on whatever rank they are, -1 for none. sm_scale float, natural units.
    Position g is rank (g // interleave) % dcp_world's, its local key
    g // (interleave * dcp_world) * interleave + g % interleave.
    shards: None, or one call for each rank whose results are to be merged; the other fields are
    then those of the one call over all keys (dcp_world 1), whose result the merge must be.
    """

    q: np.ndarray
    kv_cache: np.ndarray
    block_table: np.ndarray
    token_to_request: np.ndarray
    topk_positions: np.ndarray
    sm_scale: float
    dcp_rank: int = 0
    dcp_world: int = 1
    interleave: int = 1
    shards: tuple[DcpSparseInputs, ...] | None = None

    def sha256(self) -> str:
        """Hash of names, dtypes, shapes and values of every argument, those of the shards too."""
        digest = hashlib.sha256()
        digest.update(
            f"sm_scale={float(self.sm_scale).hex()} dcp={self.dcp_rank}/{self.dcp_world} "
            f"interleave={self.interleave}".encode()
        )
        for name in ("q", "kv_cache", "block_table", "token_to_request", "topk_positions"):
            add_array(digest, name, getattr(self, name))
        for shard in self.shards or ():
            digest.update(shard.sha256().encode())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DcpSparseResult(Result):
    """The result of one rank, or of all ranks merged.

    out [T, H, 512] bfloat16. lse [T, H] float32, natural-log, -inf where the rank has none of a
    token's keys. parts: one of PARTS, in what dtype the ranks' outs stood before they were merged.
    """

    out: np.ndarray
    lse: np.ndarray
    parts: str = "float32"
