"""The plan that a V4 prefill ran, held against P1 to P7, or against the one that its case
prescribes.
"""

from __future__ import annotations

from compare.judging.plan_rules import RULE_NAMES, Violation, fixed_plan, violations
from compare.judging.plans import PlanChunk
from compare.suites.v4_prefill.call import V4PrefillInputs

PRESCRIBED = "prescribed"
"""The rule of a case that prescribes its plan: that one is run, or one by P1 to P7."""

NAMES = {**RULE_NAMES, PRESCRIBED: "not-the-given-plan"}
"""The diagnosis of a broken rule, in the order in which they are told."""

MEANINGS = {
    "form": "a chunk isn't a range of at least one request of the batch with just their tokens",
    "P1": "a chunk has no query token; FlashMLA aborts on it",
    "P2": "a request with query tokens isn't in exactly one chunk, or chunks don't ascend",
    "P3": "a chunk begins with a request without query tokens",
    "P4": "requests without query tokens at the end make a chunk; they need none",
    "P5": "every request has query tokens, and the plan isn't the one by the shipped rules",
    "P6": "N or M - N is too small for a request of the chunk, one without query tokens counts "
    "too, or requests * M exceeds the area",
    "P7": "a chunk ends though the next request with query tokens fits and none without lies "
    "between",
    PRESCRIBED: "the plan is neither the one that the case prescribes nor one by P1 to P7",
}
"""What is wrong where a rule is broken."""

_OF_THE_SPLIT = ("P1", "P3", "P4", "P7")
"""Rules about which requests a chunk has: a prescribed plan may break them."""


def right_plan(inputs: V4PrefillInputs) -> tuple[PlanChunk, ...]:
    """A plan that a right implementation may have run: the prescribed one, else the fixed one."""
    return inputs.prescribed_plan or fixed_plan(inputs.batch)


def plan_violations(inputs: V4PrefillInputs, plan: tuple[PlanChunk, ...]) -> list[Violation]:
    """Every broken rule. A prescribed plan may break P1 to P7; another one that keeps them is right
    all the same. No chunk is charged with having the requests that the prescribed plan gives it.
    """
    prescribed = inputs.prescribed_plan
    if plan == prescribed:
        return []
    broken = violations(inputs.batch, plan)
    if prescribed is None or not broken:
        return broken
    ranges = {(chunk.start, chunk.end) for chunk in prescribed}
    kept = [v for v in broken if not _is_of_the_split(v, plan, ranges)]
    return kept or [_departure(plan, prescribed)]


def _is_of_the_split(
    violation: Violation, plan: tuple[PlanChunk, ...], ranges: set[tuple[int, int]]
) -> bool:
    """Whether a rule is broken by nothing but which requests a chunk has, and it has to."""
    if violation.rule not in _OF_THE_SPLIT or violation.chunk is None:
        return False
    chunk = plan[violation.chunk]
    return (chunk.start, chunk.end) in ranges


def _departure(plan: tuple[PlanChunk, ...], prescribed: tuple[PlanChunk, ...]) -> Violation:
    """Where a plan that keeps to no rule leaves the prescribed one."""
    pairs = enumerate(zip(plan, prescribed, strict=False))
    i = next((i for i, (chunk, right) in pairs if chunk != right), None)
    if i is None:
        sentence = f"the plan has {len(plan)} chunks; the case prescribes {len(prescribed)}"
        return Violation(rule=PRESCRIBED, chunk=None, sentence=sentence)
    chunk, right = plan[i], prescribed[i]
    return Violation(
        rule=PRESCRIBED,
        chunk=i,
        sentence=f"chunk {i} has the requests [{chunk.start}, {chunk.end}), "
        f"N = {chunk.compressed_rows} and M = {chunk.workspace_rows}; the case prescribes "
        f"[{right.start}, {right.end}), N = {right.compressed_rows} and M = {right.workspace_rows}",
    )
