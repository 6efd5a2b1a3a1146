"""The judge of prefill plans: the rules P1 to P7, and the reference planner beside them.

A plan that breaks a rule has the status PLAN. Where every request has query tokens there is exactly
one right plan; where some have none, a request without tokens may stay inside a chunk (V1) or end
it (V2), and the rules decide. A reference made by the rules that vLLM 0.33.0 ships emits chunks
without tokens there: that is its known fault and no failed reference, and a note says what the
candidate does instead.
"""

from __future__ import annotations

from compare.judging.plan_rules import RULE_NAMES, Violation, shipped_plan, violations
from compare.judging.plans import PlanChunk, PlanResult, PrefillPlanInputs
from compare.judging.tolerance import check_profile
from compare.protocol.verdict import Diagnosis, Status, Verdict


def judge(
    inputs: PrefillPlanInputs,
    candidate: PlanResult,
    reference: PlanResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: object = None,
) -> Verdict:
    """Judges a candidate's plan for this batch.

    profile and evidence are those of the other suites and change nothing here: plans are whole
    numbers. ValueError for an unknown profile.
    """
    check_profile(profile)
    broken = violations(inputs, candidate.chunks)
    notes, reference_failed = list(candidate.notes), None
    if reference is not None:
        reference_failed, said = _beside(inputs, candidate, reference)
        notes += said
    found = {
        v.rule: Diagnosis(name=RULE_NAMES[v.rule], sentence=v.sentence) for v in reversed(broken)
    }
    return Verdict(
        status=Status.PLAN if broken else Status.PASS,
        reason="; ".join(f"{_of(v)}{v.sentence}" for v in broken),
        diagnosis=tuple(found[rule] for rule in RULE_NAMES if rule in found),
        reference_failed=reference_failed,
        notes=tuple(notes),
    )


def explain(inputs: PrefillPlanInputs, plan: PlanResult) -> list[str]:
    """Each rule that a plan breaks, in words: the chunk, its requests, and whether FlashMLA would
    abort on it. [] for a plan that is right.
    """
    return [f"{_of(v)}{v.sentence}" for v in violations(inputs, plan.chunks)]


def _of(violation: Violation) -> str:
    return "" if violation.rule == "form" else f"{violation.rule}: "


def _beside(
    inputs: PrefillPlanInputs, candidate: PlanResult, reference: PlanResult
) -> tuple[str | None, list[str]]:
    """Whether the reference itself is wrong, and notes on where the two plans differ."""
    broken = violations(inputs, reference.chunks)
    shipped = reference.chunks == shipped_plan(inputs)
    if broken and not shipped:
        return f"{_of(broken[0])}{broken[0].sentence}", []
    if candidate.chunks == reference.chunks:
        return None, []
    count = len(reference.chunks)
    notes = [
        f"the reference has {count} {'chunk' if count == 1 else 'chunks'} "
        f"{_ranges(reference.chunks)}, "
        f"the candidate {len(candidate.chunks)} {_ranges(candidate.chunks)}"
    ]
    empty = [i for i, c in enumerate(reference.chunks) if c.query_end <= c.query_start]
    if empty:
        which = ", ".join(map(str, empty))
        notes.append(f"the reference follows the shipped rules; no query token is in chunk {which}")
    elif broken:
        notes.append(f"the reference follows the shipped rules; {broken[0].sentence}")
    elif not all(inputs.query_lens):
        notes.append("requests without query tokens allow more than one right plan")
    return None, notes


def _ranges(chunks: tuple[PlanChunk, ...]) -> str:
    return " ".join(f"[{c.start}, {c.end})" for c in chunks) or "(none)"
