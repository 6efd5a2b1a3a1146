"""The chunks that the V4 prefill path runs: planned, or handed in and held to the invariants.

P1 to P7 are those of docs/planning-rules.md.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from jax_impl.planning import (
    PrefillChunk,
    compressed_lens,
    gather_lens,
    max_workspace_area,
    plan_prefill_chunks,
)
from jax_impl.prefill.indices.checks import INT32_MAX


class PlanRequest(NamedTuple):
    """What a plan is made of: host-side numbers alone."""

    seq_lens: tuple[int, ...]  # upper bounds are enough
    query_lens: tuple[int, ...]
    compress_ratio: int
    has_compressed: bool
    window: int
    max_model_len: int
    max_num_batched_tokens: int
    chunk_size: int

    @property
    def area(self) -> int:
        """Workspace rows that the engine plans for."""
        return max_workspace_area(
            compress_ratio=self.compress_ratio,
            window=self.window,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunk_size=self.chunk_size,
            has_compressed=self.has_compressed,
        )

    def plan(self) -> tuple[PrefillChunk, ...]:
        return plan_prefill_chunks(
            self.seq_lens,
            self.query_lens,
            compress_ratio=self.compress_ratio,
            window=self.window,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunk_size=self.chunk_size,
            has_compressed=self.has_compressed,
        )


def check_plan(plan: Any, request: PlanRequest) -> tuple[PrefillChunk, ...]:
    """A plan that was handed in, once it is one: P1, P2 and P6, each violation by its name.

    P3, P4 and P7 say where a planner should cut, P5 what it should return: a plan that breaks
    those is slower or unusual, and computes the same.
    """
    if not isinstance(plan, Sequence) or not all(isinstance(c, PrefillChunk) for c in plan):
        raise ValueError(
            f"plan must be a sequence of jax_impl.planning.PrefillChunk, or None; got {plan!r}"
        )
    plan = [_of_whole_numbers(chunk, number) for number, chunk in enumerate(plan)]
    queries = request.query_lens
    offsets = (0, *accumulate(queries))
    compressed = compressed_lens(
        request.seq_lens,
        compress_ratio=request.compress_ratio,
        has_compressed=request.has_compressed,
    )
    gathered = gather_lens(request.seq_lens, queries, window=request.window)
    area, behind = request.area, 0
    for number, chunk in enumerate(plan):
        what = f"plan must be legal; got chunk {number}, {chunk}, which"
        if not behind <= chunk.start < chunk.end <= len(queries):
            raise ValueError(
                f"{what} breaks P2: chunks are ascending, disjoint ranges of the {len(queries)} "
                f"requests, and requests from {behind} on are left here"
            )
        for missed in range(behind, chunk.start):
            _refuse_uncovered(missed, queries)
        behind = chunk.end
        tokens = (offsets[chunk.start], offsets[chunk.end])
        if tokens[0] == tokens[1]:
            raise ValueError(f"{what} breaks P1: it has no query token")
        if (chunk.query_start, chunk.query_end) != tokens:
            raise ValueError(f"{what} breaks P2: its requests have the query tokens {tokens}")
        for i in range(chunk.start, chunk.end):
            rows = chunk.compressed_rows, chunk.workspace_rows - chunk.compressed_rows
            if rows[0] < compressed[i] or rows[1] < gathered[i]:
                raise ValueError(
                    f"{what} breaks P6: request {i} needs {compressed[i]} compressed and "
                    f"{gathered[i]} window rows"
                )
        size = (chunk.end - chunk.start) * chunk.workspace_rows
        if chunk.end - chunk.start > 1 and size > area:
            raise ValueError(f"{what} breaks P6: it takes {size} of {area} workspace rows")
    for missed in range(behind, len(queries)):
        _refuse_uncovered(missed, queries)
    return tuple(plan)


def _of_whole_numbers(chunk: PrefillChunk, number: int) -> PrefillChunk:
    fields = dataclasses.asdict(chunk)
    for name, value in fields.items():
        try:
            if isinstance(value, bool):
                raise TypeError
            fields[name] = operator.index(value)
        except TypeError:
            raise ValueError(
                f"plan must have whole numbers in its chunks; got {value!r} as {name} of chunk "
                f"{number}, {chunk}"
            ) from None
    return PrefillChunk(**fields)


def check_area(plan: tuple[PrefillChunk, ...], request: PlanRequest) -> None:
    """Each chunk's workspace is within the planned area.

    Only a request that is larger than the engine admits, alone in its chunk, isn't.
    """
    for chunk in plan:
        rows = (chunk.end - chunk.start) * chunk.workspace_rows
        if rows > request.area:
            raise ValueError(
                f"max_model_len and max_num_batched_tokens must admit every request: request "
                f"{chunk.start} alone takes {rows} workspace rows, and {request.area} are planned "
                f"for max_model_len {request.max_model_len}, max_num_batched_tokens "
                f"{request.max_num_batched_tokens} and chunk_size {request.chunk_size}"
            )
        if rows > INT32_MAX:
            raise ValueError(
                f"chunk_size must keep a workspace under 2^31 rows, as indices are int32; the "
                f"chunk of requests {chunk.start} to {chunk.end - 1} takes {rows}"
            )


def _refuse_uncovered(request: int, queries: tuple[int, ...]) -> None:
    if queries[request]:
        raise ValueError(
            f"plan must be legal; got one that breaks P2: request {request} has {queries[request]} "
            "query tokens and is in no chunk"
        )
