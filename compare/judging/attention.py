"""The judge of sparse prefill: shapes and dtypes, special values, then numbers, three ways.

Candidate and reference are each judged against the float64 oracle. Two results that are each within
their bound of the oracle are within the sum of both of one another, so the distance between them is
reported and needs no bound of its own; the flashmla profile, which has one, applies it as well. A
reference that is itself out of bounds is named, and the case is judged against the oracle alone.
"""

from __future__ import annotations

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.attention_faults import FAULTS
from compare.judging.diagnosis import diagnose
from compare.judging.evidence import Evidence
from compare.judging.exact_keys import key_difference
from compare.judging.result_view import ResultView, check_form
from compare.judging.sides import Side
from compare.judging.sparse_witness import SparseWitness
from compare.judging.tolerance import check_profile
from compare.judging.verdicts import Remarks, refusal, verdict_on
from compare.protocol.case import Case
from compare.protocol.verdict import Verdict

__all__ = ["evidence_of", "judge", "side_of"]


def judge(
    inputs: SparsePrefillInputs,
    candidate: SparsePrefillResult,
    reference: SparsePrefillResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: Evidence[SparseWitness] | None = None,
) -> Verdict:
    """Judges a candidate's result on these inputs.

    reference: a result that is believed, whole or with out_rows; None judges against the oracle
    alone. profile: "calibrated", "flashmla", or "both" (fails when either fails, and says which);
    tolerance.py has both. evidence: oracle and yardstick of these very inputs, to be shared by all
    candidates of a case; None makes them.

    Every row is judged by the oracle up to 5e11 FLOP; beyond, 256 tokens drawn by the case's seed
    and those where candidate and reference differ most. Special values are judged in every row.

    ValueError: an unknown profile, or inputs that no implementation may be given.
    """
    check_profile(profile)
    if fault := check_form(inputs, candidate):
        return refusal(inputs, fault)
    evidence = evidence or evidence_of(inputs)
    other = None
    if reference is not None:
        other = check_form(inputs, reference) or side_of(inputs, reference)
    return verdict_on(
        evidence,
        side_of(inputs, candidate),
        other,
        Remarks(
            diagnose=lambda side, suspects: diagnose(
                FAULTS, evidence, side.view, suspects, side.special
            ),
            details=lambda side: key_difference(evidence.witness, side),
            notes=profile_notes(inputs.case, profile),
        ),
        profile=profile,
    )


def evidence_of(inputs: SparsePrefillInputs, device: str | None = None) -> Evidence[SparseWitness]:
    """Oracle and yardstick of one case."""
    return Evidence(SparseWitness(inputs, device))


def side_of(inputs: SparsePrefillInputs, result: SparsePrefillResult) -> Side:
    """A well-formed result, to be measured."""
    return Side(ResultView(result), inputs.case, notes=result.notes)


def profile_notes(case: Case | None, profile: str) -> tuple[str, ...]:
    """What to know of the flashmla profile on such a case."""
    if profile == "calibrated" or getattr(case, "data", None) in ("flashmla", "exact"):
        return ()
    return (
        "FlashMLA's tolerances are made for its own data, a tenth of the size of N(0, 1): on other "
        "data right kernels may fall outside of abs 8e-4",
    )
