"""What an implementation gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SparsePrefillResult:
    """One sparse prefill result at the judge's border.

    out [T, H, 512] bfloat16; or, where out_rows is given, [R, 512]: only the (token, head) rows
    out_rows[i] = token * H + head (recorded results hold some of the rows).
    max_logits [T, H] float32, natural units, or None: not compared. lse [T, H] float32, natural-
    log, empty +inf.
    notes: what an adapter did on the way (padded heads, widths), in sentences.
    Arrays may be memory-mapped; the judge reads them in blocks of rows.
    """

    out: np.ndarray
    lse: np.ndarray
    max_logits: np.ndarray | None = None
    out_rows: np.ndarray | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanChunk:
    """One chunk of a prefill plan: requests [start, end), tokens [query_start, query_end)
    (relative to the first prefill token), compressed_rows N and workspace_rows M of each
    request's workspace.
    """

    start: int
    end: int
    compressed_rows: int
    workspace_rows: int
    query_start: int
    query_end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A prefill plan at the judge's border."""

    chunks: tuple[PlanChunk, ...]
    notes: tuple[str, ...] = ()


PARTS = ("float32", "bfloat16", "bfloat16 twice")
"""By how often parts were rounded."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DcpDecodeResult:
    """One decode result at the judge's border: of one rank, or of all ranks merged.

    out [T, H, 512] bfloat16 (float32 where it is still to be merged); or, where out_rows is given,
    [R, 512]: only the (token, head) rows out_rows[i] = token * H + head. lse [T, H] float32,
    natural-log, empty -inf. T counts padded rows too: out 0, lse -inf there.
    parts: one of PARTS: in what dtype results over parts of the keys stood before they were merged,
    "float32" or "bfloat16": the ranks' results, or those of ranges of keys that a kernel splits a
    request into; "bfloat16 twice" where both are.
    notes: what an adapter did on the way, in sentences.
    """

    out: np.ndarray
    lse: np.ndarray
    out_rows: np.ndarray | None = None
    parts: str = "float32"
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlanResult:
    """A plan of decode rows at the judge's border; the tuples have one entry per row of q.

    ragged: the rows can't be viewed as [requests, max_query_len]. request: whose block table and
    length a row uses. bound: exclusive global bound on the key positions that it sees.
    local_counts: how many of its request's keys on this rank it sees. padding: the row belongs to
    no request.
    """

    ragged: bool
    request: tuple[int, ...]
    bound: tuple[int, ...]
    local_counts: tuple[int, ...]
    padding: tuple[bool, ...]
    notes: tuple[str, ...] = ()


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
class V4PrefillResult:
    """One result of the whole V4 prefill path at the judge's border.

    out [T, H, 512] bfloat16; or, where out_rows is given, [R, 512]: only the (token, head) rows
    out_rows[i] = token * H + head. max_logits [T, H] float32, natural units, or None: not compared.
    lse [T, H] float32, natural-log, empty +inf.
    plan: the chunks that ran, or None: not compared. stages: one for each chunk of the plan, or
    None: not compared.
    parts: in what dtype results over ranges of a token's keys stood before they were merged, of
    PARTS, by a kernel that splits them; None: there were none.
    notes: what an adapter did on the way, in sentences.
    """

    out: np.ndarray
    lse: np.ndarray
    max_logits: np.ndarray | None = None
    out_rows: np.ndarray | None = None
    parts: str | None = None
    plan: tuple[PlanChunk, ...] | None = None
    stages: tuple[ChunkStage, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class V4StagesResult:
    """What one stage of the path gives back, by name.

    combine: indices [T, C] int32, lengths [T] int32. global_topk: slots [T, topk] int32, lengths
    [T] int32. gather: workspace [n, M, 512] bfloat16, whole.
    """

    arrays: Mapping[str, np.ndarray]
    notes: tuple[str, ...] = ()


Result = (
    SparsePrefillResult
    | PlanResult
    | DcpDecodeResult
    | DecodePlanResult
    | V4PrefillResult
    | V4StagesResult
)
