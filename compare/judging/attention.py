"""The judge of sparse prefill: shapes and dtypes, special values, then numbers, three ways.

Candidate and reference are each judged against the float64 oracle. Two results that are each within
their bound of the oracle are within the sum of both of one another, so the distance between them is
reported and needs no bound of its own; the flashmla profile, which has one, applies it as well. A
reference that is itself out of bounds is named, and the case is judged against the oracle alone.
"""

from __future__ import annotations

import math

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.diagnosis import diagnose
from compare.judging.evidence import Evidence
from compare.judging.exact_keys import key_difference
from compare.judging.result_view import ResultView, check_form
from compare.judging.sides import Side, measure
from compare.judging.tolerance import check_profile
from compare.judging.weighing import weigh
from compare.protocol.case import Case
from compare.protocol.verdict import Verdict

__all__ = ["Evidence", "judge", "share_by_tensor"]


def judge(
    inputs: SparsePrefillInputs,
    candidate: SparsePrefillResult,
    reference: SparsePrefillResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: Evidence | None = None,
) -> Verdict:
    """What is to be said about a candidate's result on these inputs.

    reference: a result that is believed, whole or with out_rows; None judges against the oracle
    alone. profile: "calibrated", "flashmla", or "both" (fails when either fails, and says which);
    tolerance.py has both. evidence: oracle and yardstick of these very inputs, to be shared by all
    candidates of a case; None makes them.

    Every row is judged by the oracle up to 5e11 FLOP; beyond, 256 tokens drawn by the case's seed
    and those where candidate and reference differ most. Special values are judged in every row.

    ValueError: an unknown profile, or inputs that no implementation may be given.
    """
    check_profile(profile)
    rows_total = inputs.q.shape[0] * inputs.q.shape[1]
    if fault := check_form(inputs, candidate):
        return Verdict(status=fault.status, reason=fault.reason, rows_total=rows_total)
    evidence = evidence or Evidence(inputs)
    reference_failed = None
    if reference is not None and (fault := check_form(inputs, reference)):
        reference, reference_failed = None, fault.reason

    return weigh(
        evidence,
        Side(ResultView(candidate), inputs.case),
        None if reference is None else Side(ResultView(reference), inputs.case),
        profile=profile,
        reference_failed=reference_failed,
        explain=lambda side, suspects: diagnose(evidence, side.view, suspects, side.special),
        more=lambda side: _keys_in_words(evidence, side),
        notes=(
            *candidate.notes,
            *(() if reference is None else (f"reference: {note}" for note in reference.notes)),
            *evidence.notes,
            *profile_notes(inputs.case, profile),
        ),
        not_compared=() if candidate.max_logits is not None else ("max_logits",),
    )


def share_by_tensor(
    inputs: SparsePrefillInputs, result: SparsePrefillResult, evidence: Evidence
) -> dict[str, float]:
    """The largest share of the calibrated bounds that a well-formed result uses, by tensor, and of
    "out tensor", the bound of out as a whole. inf where a special value is at the wrong place.
    """
    side = Side(ResultView(result), inputs.case)
    measure(evidence, (side,), None)
    return side.shares | {finding.tensor: math.inf for finding in side.special.findings}


def profile_notes(case: Case | None, profile: str) -> tuple[str, ...]:
    """What to know of the flashmla profile on such a case."""
    if profile == "calibrated" or getattr(case, "data", None) in ("flashmla", "exact"):
        return ()
    return (
        "FlashMLA's tolerances are made for its own data, a tenth of the size of N(0, 1): on other "
        "data right kernels may fall outside of abs 8e-4",
    )


def _keys_in_words(evidence: Evidence, side: Side) -> list[str]:
    """On exact data, which key a wrong row lacks or has too many."""
    if not side.exact or "out" not in side.numbers.calibrated_failures:
        return []
    return key_difference(evidence, side.view, side.numbers.worst["out"])
