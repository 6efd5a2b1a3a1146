"""One batch of V4 prefill: what an implementation is given and what it gives back. Arrays are NumPy
(bfloat16 through ml_dtypes).
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cached_property

import numpy as np

from compare.judging.plan_rules import alone_plan, shipped_plan
from compare.judging.plans import PlanChunk, PrefillPlanInputs
from compare.protocol.hashing import add_array
from compare.protocol.inputs import Inputs, Result


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ChunkStage:
    """What one chunk of requests [s, e) with t tokens had before its attention.

    workspace [e - s, M, 512] bfloat16: rows [0, N) of a request are its compressed entries, rows
    from N on its gathered positions; what nothing was written to holds anything. indices [t, C]
    int32: rows of the workspace viewed as [(e - s) * M, 512], of which token j takes the first
    lengths[j] (int32 [t]).
    """

    workspace: np.ndarray
    indices: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class V4PrefillResult(Result):
    """One result of the whole V4 prefill path at the judge's border.

    out [T, H, 512] bfloat16; or, where out_rows is given, [R, 512]: only the (token, head) rows
    out_rows[i] = token * H + head. max_logits [T, H] float32, natural units, or None: not compared.
    lse [T, H] float32, natural-log, empty +inf.
    plan: the chunks that ran, or None: not compared. stages: one for each chunk of the plan, or
    None: not compared.
    parts: in what dtype results over ranges of a token's keys stood before they were merged, of
    PARTS, by a kernel that splits them; None: there were none.
    """

    out: np.ndarray
    lse: np.ndarray
    max_logits: np.ndarray | None = None
    out_rows: np.ndarray | None = None
    parts: str | None = None
    plan: tuple[PlanChunk, ...] | None = None
    stages: tuple[ChunkStage, ...] | None = None


Spans = tuple[tuple[int, int], ...]
"""Images of one request: (first, last) positions, both inclusive."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class V4PrefillInputs(Inputs):
    """Arguments of one sparse prefill over paged caches; n requests of T tokens.

    q [T, H, 512] bfloat16. query_start_loc [n + 1] int32: request i has the rows
    query_start_loc[i] - query_start_loc[0] to query_start_loc[i + 1] - query_start_loc[0]; the
    first entry may be above 0. seq_lens [n] int32: tokens of context, this step's included.
    seq_lens_bound [n] int32: what the host knows of them when it plans, none smaller; None: the
    lengths themselves.
    swa_cache, compressed_cache: uint8 [pages, page stride in bytes] with kv_format "v4-fp8",
    bfloat16 [pages, P, 512] with "bf16"; P is swa_page and compressed_page. Position p of request i
    is token p % P of page block_table[i, p // P], and so is compressed entry c of its own cache and
    table (int32 [n, columns]; a column that no token of the request needs holds anything).
    compressed_*: None where there is no compressed cache (compress_ratio 1).
    topk_indices [T, topk] int32: the compressed entries that token t at position pos chose, the
    first min((pos + 1) // compress_ratio, topk) of its row, distinct and all visible to it; the
    rest of the row is -1. None without a compressed cache.
    attn_sink [H] float32 natural-log units, or None. sm_scale float, natural units. window: how
    many positions a token sees, its own included. image_spans: a tuple for each request, all of
    whose images lie in this step's tokens and have at most max_image_tokens positions; None: no
    images.
    max_model_len, max_num_batched_tokens, chunk_size: of the chunk planner. plan_rules: fixed,
    alone (each request a chunk of its own) or vllm-0.33.0.
    """

    q: np.ndarray
    swa_cache: np.ndarray
    swa_block_table: np.ndarray
    swa_page: int
    compressed_cache: np.ndarray | None = None
    compressed_block_table: np.ndarray | None = None
    compressed_page: int | None = None
    kv_format: str = "v4-fp8"
    topk_indices: np.ndarray | None = None
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    seq_lens_bound: np.ndarray | None = None
    attn_sink: np.ndarray | None = None
    sm_scale: float
    compress_ratio: int
    window: int = 128
    image_spans: tuple[Spans, ...] | None = None
    max_image_tokens: int = 0
    max_model_len: int
    max_num_batched_tokens: int
    chunk_size: int = 4
    plan_rules: str = "fixed"

    @cached_property
    def batch(self) -> PrefillPlanInputs:
        """What a planner is given of it: the lengths that the host knows."""
        bounds = self.seq_lens if self.seq_lens_bound is None else self.seq_lens_bound
        return PrefillPlanInputs(
            seq_lens=tuple(bounds.tolist()),
            query_lens=tuple(np.diff(self.query_start_loc).tolist()),
            compress_ratio=self.compress_ratio,
            window=self.window,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunk_size=self.chunk_size,
            has_compressed=self.compressed_cache is not None,
        )

    @cached_property
    def prescribed_plan(self) -> tuple[PlanChunk, ...] | None:
        """The plan that must be run; None where an implementation plans by the fixed rules."""
        if self.plan_rules == "fixed":
            return None
        return {"alone": alone_plan, "vllm-0.33.0": shipped_plan}[self.plan_rules](self.batch)

    def sha256(self) -> str:
        """Hash of names, dtypes, shapes and values of every argument."""
        digest = hashlib.sha256(f"sm_scale={float(self.sm_scale).hex()}".encode())
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in V4_PREFILL_ARRAYS:
                add_array(digest, field.name, value)
            elif field.name not in ("sm_scale", "case"):
                digest.update(f" {field.name}={value!r}".encode())
        return digest.hexdigest()


V4_PREFILL_ARRAYS = (
    "q",
    "swa_cache",
    "swa_block_table",
    "compressed_cache",
    "compressed_block_table",
    "topk_indices",
    "query_start_loc",
    "seq_lens",
    "seq_lens_bound",
    "attn_sink",
)
