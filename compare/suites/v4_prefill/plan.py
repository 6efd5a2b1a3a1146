"""The plan that a V4 prefill ran, held against P1 to P7, or against the one that it was given."""

from __future__ import annotations

import numpy as np

from compare.judging.plan_rules import (
    RULE_NAMES,
    Violation,
    fixed_plan,
    shipped_plan,
    sizes,
    violations,
)
from compare.judging.plans import PlanChunk, PrefillPlanInputs
from compare.suites.v4_prefill.call import V4PrefillInputs

GIVEN = "given"
"""The rule of a plan that was given: it is run as it is, or one by P1 to P7 is."""

NAMES = {**RULE_NAMES, GIVEN: "not-the-given-plan"}
"""The diagnosis of a broken rule, in the order in which they are told."""

MEANINGS = {
    "form": "a chunk isn't a range of at least one request of the batch with just their tokens",
    "P1": "a chunk has no query token; FlashMLA aborts on it",
    "P2": "a request with query tokens isn't in exactly one chunk, or chunks don't ascend",
    "P3": "a chunk begins with a request without query tokens",
    "P4": "requests without query tokens at the end make a chunk; they are due none",
    "P5": "every request has query tokens, and the plan isn't the one by the shipped rules",
    "P6": "N or M - N is too small for a request of the chunk, one without query tokens counts "
    "too, or requests * M exceeds the area",
    "P7": "a chunk ends though the next request with query tokens fits and none without lies "
    "between",
    GIVEN: "the plan is neither the one that the case prescribes nor one by P1 to P7",
}
"""What is wrong where a rule is broken."""

_OF_THE_SPLIT = ("P1", "P3", "P4", "P7")
"""Rules about which requests a chunk has: a plan that was given may break them."""


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
    """A plan that a right implementation may have run: the given one, else the fixed one."""
    given = given_plan(inputs)
    return fixed_plan(planner_inputs(inputs)) if given is None else given


def plan_violations(inputs: V4PrefillInputs, plan: tuple[PlanChunk, ...]) -> list[Violation]:
    """Every broken rule. A plan that was given may break P1 to P7; one that keeps them is right
    all the same. No chunk is charged with having the requests that the given plan gives it.
    """
    given = given_plan(inputs)
    if plan == given:
        return []
    found = violations(planner_inputs(inputs), plan)
    if given is None or not found:
        return found
    prescribed = {(chunk.start, chunk.end) for chunk in given}
    kept = [v for v in found if not _prescribed(v, plan, prescribed)]
    return kept or [_other_than_given(plan, given)]


def _prescribed(
    violation: Violation, plan: tuple[PlanChunk, ...], ranges: set[tuple[int, int]]
) -> bool:
    """Whether a rule is broken by nothing but which requests a chunk has, and it has to."""
    if violation.rule not in _OF_THE_SPLIT or violation.chunk is None:
        return False
    chunk = plan[violation.chunk]
    return (chunk.start, chunk.end) in ranges


def _other_than_given(plan: tuple[PlanChunk, ...], given: tuple[PlanChunk, ...]) -> Violation:
    """A plan that is neither the given one nor one by the rules: where it leaves the given one."""
    pairs = enumerate(zip(plan, given, strict=False))
    i = next((i for i, (chunk, due) in pairs if chunk != due), None)
    if i is None:
        sentence = f"the plan has {len(plan)} chunks; the case prescribes {len(given)}"
        return Violation(rule=GIVEN, chunk=None, sentence=sentence)
    chunk, due = plan[i], given[i]
    return Violation(
        rule=GIVEN,
        chunk=i,
        sentence=f"chunk {i} has the requests [{chunk.start}, {chunk.end}), "
        f"N = {chunk.compressed_rows} and M = {chunk.workspace_rows}; the case prescribes "
        f"[{due.start}, {due.end}), N = {due.compressed_rows} and M = {due.workspace_rows}",
    )
