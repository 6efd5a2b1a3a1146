"""What planners of prefill chunks and of decode rows are given: batches; and give back: plans."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from compare.protocol.inputs import Inputs, Result
from compare.protocol.values import whole_numbers

SHIPPED = "vllm-0.33.0"
FIXED = "jax-planner"
FIXED_AGAIN = "torch-planner"
"""The planners that the command `plan` sets beside one another."""

DISAGREE = f"the planners {FIXED} and {FIXED_AGAIN} disagree about this batch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlanInputs(Inputs):
    """Arguments of a chunk planner, all lengths in tokens; names as in plan_prefill_chunks."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    compress_ratio: int
    window: int
    max_model_len: int
    max_num_batched_tokens: int
    chunk_size: int
    has_compressed: bool | None = None

    def sha256(self) -> str:
        """Hash of every argument."""
        return _hash_of_numbers(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlanInputs(Inputs):
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

    def sha256(self) -> str:
        """Hash of every argument."""
        return _hash_of_numbers(self)


def _hash_of_numbers(inputs: PrefillPlanInputs | DecodePlanInputs) -> str:
    fields = {
        f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if f.name != "case"
    }
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()


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
class PlanResult(Result):
    """A prefill plan at the judge's border."""

    chunks: tuple[PlanChunk, ...]


def plan_chunks(plan: Any, name: str) -> tuple[PlanChunk, ...]:
    """The plan that `name` gave: a sequence of chunks, as objects with the six attributes or tuples
    of them. TypeError for anything else, and for what isn't a whole number."""
    if isinstance(plan, PlanResult):
        return plan.chunks
    fields = [field.name for field in dataclasses.fields(PlanChunk)]
    chunks = []
    for number, chunk in enumerate(plan):
        if all(hasattr(chunk, field) for field in fields):
            words = [getattr(chunk, field) for field in fields]
        elif isinstance(chunk, (tuple, list)) and len(chunk) == len(fields):
            words = list(chunk)
        else:
            raise TypeError(
                f"{name} returned a {type(chunk).__name__} as chunk {number}; accepted: an object "
                f"with {', '.join(fields)}, or a tuple of these"
            )
        whole = whole_numbers(words, f"chunk {number} of {name}")
        chunks.append(PlanChunk(**dict(zip(fields, whole, strict=True))))
    return tuple(chunks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlanResult(Result):
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
