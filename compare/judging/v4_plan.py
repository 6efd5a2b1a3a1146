"""The plan that a V4 prefill ran, held against P1 to P7, or against the one that it was given."""

from __future__ import annotations

import numpy as np

from compare.cases.inputs import PrefillPlanInputs
from compare.cases.v4_inputs import V4PrefillInputs
from compare.judging.plan_rules import Violation, shipped_plan, sizes, violations
from compare.run.result import PlanChunk


def planner_inputs(inputs: V4PrefillInputs) -> PrefillPlanInputs:
    """What the planner is given of a batch: the host's lengths."""
    bounds = inputs.seq_lens if inputs.seq_lens_bound is None else inputs.seq_lens_bound
    return PrefillPlanInputs(
        seq_lens=tuple(bounds.tolist()),
        query_lens=tuple(np.diff(inputs.query_start_loc).tolist()),
        compress_ratio=inputs.compress_ratio,
        window=inputs.window,
        max_model_len=inputs.max_model_len,
        max_num_batched_tokens=inputs.max_num_batched_tokens,
        chunk_size=inputs.chunk_size,
        has_compressed=inputs.compressed_cache is not None,
    )


def given_plan(inputs: V4PrefillInputs) -> tuple[PlanChunk, ...] | None:
    """The plan that is to be run; None where it is to be planned by the fixed rules."""
    batch = planner_inputs(inputs)
    if inputs.plan_rules == "vllm-0.33.0":
        return shipped_plan(batch)
    if inputs.plan_rules != "alone":
        return None
    known = sizes(batch)
    return tuple(
        PlanChunk(
            start=request,
            end=request + 1,
            compressed_rows=known.compressed[request],
            workspace_rows=known.compressed[request] + known.gather[request],
            query_start=known.first_token[request],
            query_end=known.first_token[request + 1],
        )
        for request, queries in enumerate(batch.query_lens)
        if queries
    )


def right_plan(inputs: V4PrefillInputs) -> tuple[PlanChunk, ...]:
    """A plan that a right implementation may have run: the given one, else the reference's."""
    given = given_plan(inputs)
    if given is not None:
        return given
    from torch_ref.planning import plan_prefill_chunks

    batch = planner_inputs(inputs)
    chunks = plan_prefill_chunks(
        batch.seq_lens,
        batch.query_lens,
        compress_ratio=batch.compress_ratio,
        window=batch.window,
        max_model_len=batch.max_model_len,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        chunk_size=batch.chunk_size,
        has_compressed=batch.has_compressed,
    )
    return tuple(PlanChunk(**vars(chunk)) for chunk in chunks)


def plan_violations(inputs: V4PrefillInputs, plan: tuple[PlanChunk, ...]) -> list[Violation]:
    """Every broken rule. A plan that was given may break P1 to P7; one that keeps them is right
    all the same.
    """
    return [] if plan == given_plan(inputs) else violations(planner_inputs(inputs), plan)
