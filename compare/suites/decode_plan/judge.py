"""The judge of decode plans: each row's request, bound and local count, by the rules alone.

A plan that breaks a rule has the status PLAN. There is exactly one right plan of a batch, apart
from what padded rows name as their request and bound: nothing may come of either, since a padded
row sees no key. A reference made by the rules that vLLM 0.33.0 ships views a ragged batch as
uniform: that is its known fault and no failed reference, and a note says where it differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise

from compare.generate.ownership import local_length
from compare.judging.decode_plan_rules import (
    RightPlan,
    Violation,
    count_of,
    divided_view,
    right_plan,
    row_count,
    violations,
)
from compare.judging.plans import DecodePlanInputs, DecodePlanResult
from compare.judging.tolerance import check_profile
from compare.protocol.verdict import Diagnosis, Status, Verdict

__all__ = ["explain", "harmless", "judge"]

_NAMES = {
    "rows": "row-count",
    "ragged": "ragged-flag",
    "padding": "padding-flags",
    "request": "wrong-request",
    "bound": "wrong-bound",
    "local-count": "wrong-local-count",
}


def judge(
    inputs: DecodePlanInputs,
    candidate: DecodePlanResult,
    reference: DecodePlanResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: object = None,
) -> Verdict:
    """Judges a candidate's plan of this batch.

    profile and evidence are those of the other suites and change nothing here: plans are whole
    numbers. ValueError for an unknown profile.
    """
    check_profile(profile)
    broken = violations(inputs, candidate)
    notes, reference_failed = list(candidate.notes), None
    if reference is not None:
        reference_failed, said = _beside(inputs, candidate, reference)
        notes += said
    return Verdict(
        status=Status.PLAN if broken else Status.PASS,
        reason="; ".join(_sentences(inputs, candidate, broken)),
        diagnosis=tuple(_diagnosis(inputs, candidate, broken)),
        reference_failed=reference_failed,
        notes=tuple(notes),
    )


def explain(inputs: DecodePlanInputs, plan: DecodePlanResult) -> list[str]:
    """Each rule that a plan breaks, in words: which rows use which request's keys, and what bounds
    they have and should have. [] for a plan that is right.
    """
    return _sentences(inputs, plan, violations(inputs, plan))


def harmless(inputs: DecodePlanInputs, plan: DecodePlanResult) -> bool:
    """Whether every row is right, whatever the plan calls the batch: requests with one token each
    under a promise of eight may be viewed as [requests, 1], and are ragged all the same.
    """
    return all(violation.rule == "ragged" for violation in violations(inputs, plan))


def _sentences(
    inputs: DecodePlanInputs, plan: DecodePlanResult, broken: list[Violation]
) -> list[str]:
    said = [violation.sentence for violation in broken]
    if any(v.rule in ("request", "bound") for v in broken) and _is_divided(inputs, plan):
        said.insert(0, _division(inputs))
    return said


def _is_divided(inputs: DecodePlanInputs, plan: DecodePlanResult) -> bool:
    """Whether the real rows are those of the batch viewed as [requests, rows / requests]."""
    view, real = divided_view(inputs), inputs.query_start_loc[-1]
    return view is not None and all(
        viewed[:real] == given[:real]
        for viewed, given in zip(view, (plan.request, plan.bound), strict=True)
    )


def _division(inputs: DecodePlanInputs) -> str:
    lens = "+".join(str(end - start) for start, end in pairwise(inputs.query_start_loc))
    rows, requests = row_count(inputs), len(inputs.total_lens)
    padded = rows - inputs.query_start_loc[-1]
    padding = f" and {padded} rows of padding" if padded else ""
    each = rows // requests
    return f"{lens}{padding} is viewed as {'+'.join([str(each)] * requests)}"


def _diagnosis(
    inputs: DecodePlanInputs, plan: DecodePlanResult, broken: list[Violation]
) -> Iterator[Diagnosis]:
    """One known fault that explains all real rows, else each broken rule by its own name."""
    rules = {violation.rule: violation for violation in reversed(broken)}
    explained: set[str] = set()
    if rules.keys() & {"request", "bound", "local-count"} and "rows" not in rules:
        known = _known_fault(inputs, plan, right_plan(inputs))
        if known is not None:
            yield known
            explained = {"request", "bound", "local-count"}
            if known.name == "viewed-as-uniform":
                explained.add("ragged")
    for rule, name in _NAMES.items():
        if rule in rules and rule not in explained:
            yield Diagnosis(name=name, sentence=rules[rule].sentence)


def _known_fault(
    inputs: DecodePlanInputs, plan: DecodePlanResult, expected: RightPlan
) -> Diagnosis | None:
    """The fault that gives exactly these requests, bounds and counts on the real rows."""
    real = inputs.query_start_loc[-1]
    right_rows = plan.request[:real] == expected.request[:real]
    bounds, counts = plan.bound[:real], plan.local_counts[:real]
    right_bounds, right_counts = expected.bound[:real], expected.counts[:real]
    if not right_rows or bounds != right_bounds:
        if tuple(count_of(inputs, bound) for bound in bounds) != counts:
            return None
        if _is_divided(inputs, plan):
            return Diagnosis(name="viewed-as-uniform", sentence=_division(inputs))
        if not right_rows:
            return None
        totals = tuple(inputs.total_lens[i] for i in plan.request[:real])
        if bounds == totals:
            return Diagnosis(
                name="all-rows-at-total",
                sentence="every row is bounded at its request's total length: tokens see those "
                "after them",
            )
        for step, word in ((1, "more"), (-1, "less")):
            if bounds == tuple(bound + step for bound in right_bounds):
                return Diagnosis(
                    name="bound-off-by-one", sentence=f"every row sees one key {word} than due"
                )
        return None
    return _known_count_fault(inputs, expected, counts) if counts != right_counts else None


def _known_count_fault(
    inputs: DecodePlanInputs, expected: RightPlan, counts: tuple[int, ...]
) -> Diagnosis | None:
    """The bounds are right and the counts made of them are not."""
    real = inputs.query_start_loc[-1]
    rank, world, run = inputs.dcp_rank, inputs.dcp_world, inputs.interleave

    def at_rank(other_rank: int, other_run: int) -> tuple[int, ...]:
        return tuple(
            local_length(bound, other_rank, world, other_run) for bound in expected.bound[:real]
        )

    below = [expected.bound[t] - inputs.total_lens[expected.request[t] or 0] for t in range(real)]
    local = [count_of(inputs, inputs.total_lens[expected.request[t] or 0]) for t in range(real)]
    if counts == tuple(max(n + b, 0) for n, b in zip(local, below, strict=True)):
        return Diagnosis(
            name="localised-before-expanding",
            sentence="each row's count is the local length less the tokens after it: bounds must "
            "be expanded in global positions first",
        )
    if run > 1 and counts == at_rank(rank, 1):
        return Diagnosis(
            name="interleave-ignored",
            sentence=f"the counts are those of interleave 1; the keys lie in runs of {run}",
        )
    for other in range(world):
        if other != rank and counts == at_rank(other, run):
            return Diagnosis(
                name="wrong-rank-mask", sentence=f"the counts are those of rank {other}"
            )
    return None


def _beside(
    inputs: DecodePlanInputs, candidate: DecodePlanResult, reference: DecodePlanResult
) -> tuple[str | None, list[str]]:
    """Whether the reference itself is wrong, and notes on where the two plans differ."""
    broken = violations(inputs, reference)
    shipped = all(v.rule != "rows" for v in broken) and _is_divided(inputs, reference)
    if broken and not shipped:
        return broken[0].sentence, []
    pairs = zip(_real_rows(inputs, candidate), _real_rows(inputs, reference), strict=False)
    differ = [t for t, (mine, theirs) in enumerate(pairs) if mine != theirs]
    notes = []
    if differ:
        which = ", ".join(map(str, differ[:8])) + (", ..." if len(differ) > 8 else "")
        notes.append(f"candidate and reference differ in {len(differ)} rows: {which}")
    if broken:
        notes.append(f"the reference follows the shipped rules: {_division(inputs)}")
    return None, notes


def _real_rows(inputs: DecodePlanInputs, plan: DecodePlanResult) -> Iterator[tuple[int, int, int]]:
    """Request, bound and count of each real row."""
    rows = zip(plan.request, plan.bound, plan.local_counts, strict=False)
    return islice(rows, inputs.query_start_loc[-1])
