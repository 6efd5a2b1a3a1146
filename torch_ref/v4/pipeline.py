"""The chunked V4 prefill of a serving engine, eagerly: plan, two gathers, combine, attend.

Requests are cut into chunks that fit one workspace (torch_ref.planning). For each chunk, in order:

    gather    compressed entries into rows [0, N) of each request, positions into rows [N, M)
    combine   each token's rows: its list of entries, then the positions that it sees
    attend    sparse prefill over the workspace seen as [requests * M, 512]

Source: vLLM's deepseek_v4/nvidia/flashmla.py. A chunk without query tokens, which only the shipped
rules plan, is attended with 0 tokens as the engine does: FlashMLA fails on it, torch doesn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, SupportsIndex

import torch
from jaxtyping import BFloat16, Float32, Int32
from torch import Tensor

from torch_ref.arguments import shape_of
from torch_ref.calls import called_with
from torch_ref.indices import combine_topk_swa_indices
from torch_ref.indices.checks import whole
from torch_ref.kv_cache import gather_kv
from torch_ref.planning import (
    PrefillChunk,
    Rules,
    gather_lens,
    plan_prefill_chunks,
    workspace_area_limit,
)
from torch_ref.prefill import SparsePrefillResult, sparse_prefill
from torch_ref.v4.inputs import V4Call, V4Inputs, check_call


class Attend(Protocol):
    """Sparse prefill with torch_ref.sparse_prefill's arguments and results."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        *,
        attn_sink: Tensor | None,
        topk_length: Tensor,
    ) -> SparsePrefillResult: ...


@dataclass(frozen=True, eq=False)
class ChunkStage:
    """What a chunk of requests [s, e) had before its attention.

    workspace bf16 [e - s, M, 512], NaN where nothing was gathered; indices int32 [t, C] into the
    workspace as [(e - s) * M, 512]; lengths int32 [t].
    """

    workspace: BFloat16[Tensor, "r M 512"]
    indices: Int32[Tensor, "t C"]
    lengths: Int32[Tensor, " t"]


@dataclass(frozen=True, eq=False)
class V4PrefillResult:
    """out bf16 [T, H, 512], max_logits and lse fp32 [T, H], natural-log, lse +inf for an empty row.

    max_logits is None of a kernel that returns none, plan () of one that has none. stages are one
    for each chunk of the plan, None unless asked for.
    """

    out: BFloat16[Tensor, "T H 512"]
    max_logits: Float32[Tensor, "T H"] | None
    lse: Float32[Tensor, "T H"]
    plan: tuple[PrefillChunk, ...] = ()
    stages: tuple[ChunkStage, ...] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PathCall(V4Call):
    """The arguments of v4_prefill."""

    seq_lens_bound: Sequence[SupportsIndex] | Tensor | None = None
    max_model_len: int
    max_num_batched_tokens: int
    chunk_size: int = 4
    plan: Sequence[PrefillChunk] | None = None
    rules: Rules = "fixed"
    attend: Attend = sparse_prefill
    keep_stages: bool = False


@called_with(PathCall)
def v4_prefill(call: PathCall) -> V4PrefillResult:
    """Runs DeepSeek-V4's sparse prefill from paged caches, chunk by chunk.

    q [T, H, 512] bf16 holds the tokens of n requests in order: request i's rows are
    query_start_loc[i] to query_start_loc[i + 1], counted from the first entry, and may be none.
    seq_lens [n]: context with this step's tokens. Caches are uint8 [pages, page stride] for
    "v4-fp8" and bf16 [pages, P, 512] for "bf16", P being swa_page and compressed_page; tables are
    int32 [n, columns]. topk_indices [T, topk]: which compressed entries each token chose, in any
    order, the first min((pos + 1) // compress_ratio, topk) of its row. window counts the token
    itself. image_spans: for each request its images' (first, last) positions, of at most
    max_image_tokens each. attn_sink [H] fp32 in natural-log units.

    seq_lens_bound (None: seq_lens) are the lengths that the host knows when it plans, none smaller
    than the true ones; max_model_len, max_num_batched_tokens and chunk_size set the workspace's
    area; rules says how requests are cut, plan gives chunks of one's own instead. attend computes
    the attention of one chunk. Nothing is launched without chunks.

    ValueError: arguments that don't fit (check_v4_inputs); bounds below the lengths; a plan that
    isn't in order, leaves query tokens out, or whose workspace is too small for a request or larger
    than the limit; whatever the stages refuse.
    """
    inputs = check_call(call)
    limits = {
        "compress_ratio": inputs.compress_ratio,
        "window": inputs.window,
        "max_model_len": call.max_model_len,
        "max_num_batched_tokens": call.max_num_batched_tokens,
        "chunk_size": call.chunk_size,
        "has_compressed": inputs.compressed is not None,
    }
    bounds, plan = _bounds(call.seq_lens_bound, inputs), call.plan
    if plan is None:
        plan = plan_prefill_chunks(bounds, inputs.batch.query_lens, rules=call.rules, **limits)
    plan = chunks_of(plan)
    check_plan(plan, inputs, area=workspace_area_limit(**limits))
    return run_plan(inputs, plan, attend=call.attend, keep_stages=call.keep_stages)


def run_plan(
    inputs: V4Inputs,
    plan: Iterable[PrefillChunk],
    *,
    attend: Attend = sparse_prefill,
    keep_stages: bool = False,
) -> V4PrefillResult:
    """Runs the chunks of a plan that check_plan has passed; arguments as in v4_prefill."""
    plan = tuple(plan)
    out = torch.zeros_like(inputs.q, memory_format=torch.contiguous_format)
    max_logits, lse = out.new_zeros(2, inputs.tokens, inputs.heads, dtype=torch.float32)
    stages = []
    for chunk in plan:
        stage = prepare_chunk(inputs, chunk)
        rows = slice(chunk.query_start, chunk.query_end)
        result = attend(
            inputs.q[rows],
            stage.workspace.flatten(0, 1),
            stage.indices,
            inputs.sm_scale,
            attn_sink=inputs.attn_sink,
            topk_length=stage.lengths,
        )
        out[rows], max_logits[rows], lse[rows] = result.out, result.max_logits, result.lse
        if keep_stages:
            stages.append(stage)
    return V4PrefillResult(out, max_logits, lse, plan, tuple(stages) if keep_stages else None)


def prepare_chunk(inputs: V4Inputs, chunk: PrefillChunk) -> ChunkStage:
    """Gathers one chunk's workspace, in two steps, and lists its tokens' rows of it."""
    s, e, N, M = chunk.start, chunk.end, chunk.compressed_rows, chunk.workspace_rows
    batch, device = inputs.batch, inputs.q.device
    rows = slice(chunk.query_start, chunk.query_end)
    lengths = inputs.seq_lens[s:e]
    workspace = torch.full((e - s, M, inputs.swa.d), torch.nan, dtype=torch.bfloat16, device=device)
    if inputs.compressed is not None and inputs.compressed_block_table is not None:
        entries = torch.tensor(inputs.compressed_lens[s:e], dtype=torch.int32, device=device)
        gather_kv(inputs.compressed, inputs.compressed_block_table[s:e], entries, workspace)
    gathered = torch.tensor(
        gather_lens(batch.seq_lens[s:e], batch.query_lens[s:e], window=inputs.window),
        dtype=torch.int32,
        device=device,
    )
    gather_kv(
        inputs.swa,
        inputs.swa_block_table[s:e],
        lengths,
        workspace,
        gather_lens=gathered,
        offset=N,
    )
    indices, counts = combine_topk_swa_indices(
        None if inputs.topk_indices is None else inputs.topk_indices[rows],
        inputs.query_start_loc[s : e + 1],
        lengths,
        gathered,
        window=inputs.window,
        compress_ratio=inputs.compress_ratio,
        topk=inputs.topk,
        workspace_rows=M,
        compressed_rows=N,
        image_left=None if inputs.image_left is None else inputs.image_left[rows],
        image_right=None if inputs.image_right is None else inputs.image_right[rows],
        max_image_tokens=inputs.max_image_tokens,
    )
    return ChunkStage(workspace, indices, counts)


def chunks_of(plan: Sequence[PrefillChunk]) -> tuple[PrefillChunk, ...]:
    """A plan that was handed in, its numbers as ints; ValueError where one isn't whole."""
    if not isinstance(plan, Sequence) or not all(isinstance(c, PrefillChunk) for c in plan):
        raise ValueError(f"plan: {plan!r}; accepted is a sequence of PrefillChunk")
    return tuple(
        PrefillChunk(
            **{
                field.name: whole(f"plan: {field.name} of chunk {k}", getattr(chunk, field.name), 0)
                for field in fields(chunk)
            }
        )
        for k, chunk in enumerate(plan)
    )


def check_plan(plan: Sequence[PrefillChunk], inputs: V4Inputs, *, area: int) -> None:
    """Checks that the chunks can be run: ValueError for the first that can't.

    They must be in order, over every query token, within `area` rows each, and with rows for all
    that their requests gather (zero-query ones included).

    A chunk without query tokens passes: what an engine makes of it is the question.
    """
    queries = inputs.batch.query_lens
    starts = (*inputs.batch.first_rows, inputs.tokens)
    gathered = gather_lens(inputs.batch.seq_lens, queries, window=inputs.window)
    before = 0
    for k, chunk in enumerate(plan):
        s, e = chunk.start, chunk.end
        if not before <= s < e <= len(queries):
            raise ValueError(
                f"plan: chunk {k} takes requests [{s}, {e}); accepted is a range in [{before}, "
                f"{len(queries)})"
            )
        _require_left_out_are_empty(queries, before, s, k)
        if (chunk.query_start, chunk.query_end) != (starts[s], starts[e]):
            raise ValueError(
                f"plan: chunk {k} takes tokens [{chunk.query_start}, {chunk.query_end}); those of "
                f"requests [{s}, {e}) are [{starts[s]}, {starts[e]})"
            )
        N, room = chunk.compressed_rows, chunk.workspace_rows - chunk.compressed_rows
        for i in range(s, e):
            if inputs.compressed_lens[i] > N or gathered[i] > room:
                raise ValueError(
                    f"plan: chunk {k} has {N} compressed and {room} other rows for each request; "
                    f"request {i} gathers {inputs.compressed_lens[i]} and {gathered[i]}, which "
                    "would spill into the next one's"
                )
        taken = (e - s) * chunk.workspace_rows
        if taken > area:
            raise ValueError(
                f"plan: chunk {k} of requests [{s}, {e}) takes {taken} workspace rows; the "
                f"workspace that max_model_len, max_num_batched_tokens and chunk_size plan for has "
                f"{area}"
            )
        before = e
    _require_left_out_are_empty(queries, before, len(queries), len(plan))


def _require_left_out_are_empty(queries: Sequence[int], start: int, end: int, k: int) -> None:
    for i in range(start, end):
        if queries[i]:
            raise ValueError(
                f"plan: request {i} with {queries[i]} query tokens is in no chunk (looked for "
                f"before chunk {k})"
            )


def _bounds(seq_lens_bound: Sequence[SupportsIndex] | Tensor | None, inputs: V4Inputs) -> list[int]:
    lengths = list(inputs.batch.seq_lens)
    if seq_lens_bound is None:
        return lengths
    if isinstance(seq_lens_bound, Tensor):
        if seq_lens_bound.ndim != 1 or seq_lens_bound.is_floating_point():
            raise ValueError(
                f"seq_lens_bound: {seq_lens_bound.dtype} {shape_of(seq_lens_bound)}; accepted are "
                f"{len(lengths)} whole numbers"
            )
        seq_lens_bound = seq_lens_bound.tolist()
    bounds = [int(bound) for bound in seq_lens_bound]
    if len(bounds) != len(lengths):
        raise ValueError(f"seq_lens_bound: {len(bounds)} requests; seq_lens has {len(lengths)}")
    for i, (bound, length) in enumerate(zip(bounds, lengths, strict=True)):
        if bound < length:
            raise ValueError(
                f"seq_lens_bound: {bound} for request {i} of {length} tokens; accepted are "
                f"{length} and more"
            )
    return bounds
