"""The judge of sparse attention over DCP ranks: one rank's call, or all ranks merged, which must be
the one call over all chosen keys. Shapes and dtypes, special values, then numbers, three ways, as
for sparse prefill.
"""

from __future__ import annotations

import math

from compare.judging.attention_call import PARTS, SparsePrefillResult
from compare.judging.contract import Contract
from compare.judging.diagnosis import diagnose
from compare.judging.evidence import Evidence
from compare.judging.parts import EXACT_MERGED_LSE_ULPS, MERGE_ULPS
from compare.judging.result_view import FormFault, ResultView, form_fault
from compare.judging.sides import Side
from compare.judging.tolerance import check_profile
from compare.judging.verdicts import Remarks, refusal, verdict_on
from compare.protocol.verdict import Verdict
from compare.suites.dcp_sparse.call import DcpSparseInputs, DcpSparseResult
from compare.suites.dcp_sparse.evidence import MERGED, DcpSparseWitness, evidence_of
from compare.suites.dcp_sparse.faults import FAULTS

__all__ = ["evidence_of", "judge", "side_of"]

_CONTRACT = Contract(
    tolerances=MERGED,
    whose="FlashInfer's DCP tests",
    empty_lse=-math.inf,
    no_key="the token chose no key that is there",
    nan_key="a NaN in q or in a chosen key",
    exact_lse_ulps=EXACT_MERGED_LSE_ULPS + MERGE_ULPS,
)


def judge(
    inputs: DcpSparseInputs,
    candidate: DcpSparseResult,
    reference: DcpSparseResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: Evidence[DcpSparseWitness] | None = None,
) -> Verdict:
    """Judges a candidate's result on these inputs.

    Where inputs.shards is set the result is that of all ranks merged, and the oracle that of the
    one call over all keys. reference, profile, evidence: as for sparse prefill. Rows without a key:
    out 0, lse -inf, exactly.

    ValueError: an unknown profile; inputs that no implementation may be given; shards that don't
    make up the whole; unknown parts.
    """
    check_profile(profile)
    if fault := _form(inputs, candidate):
        return refusal(inputs, fault)
    evidence = evidence or evidence_of(inputs)
    other = None
    if reference is not None:
        other = _form(inputs, reference) or side_of(inputs, reference)
    return verdict_on(
        evidence,
        side_of(inputs, candidate),
        other,
        Remarks(
            diagnose=lambda side, suspects: diagnose(
                FAULTS, evidence, side.view, suspects, side.special
            ),
            details=lambda _: [],
        ),
        profile=profile,
    )


def side_of(inputs: DcpSparseInputs, result: DcpSparseResult) -> Side:
    """A well-formed result, to be measured."""
    view = ResultView(_plain(result), merges_parts=True, rounded_parts=PARTS.index(result.parts))
    return Side(view, inputs.case, _CONTRACT, notes=result.notes)


def _form(inputs: DcpSparseInputs, result: DcpSparseResult) -> FormFault | None:
    if result.parts not in PARTS:
        accepted = ", ".join(PARTS)
        raise ValueError(f"result: parts is {result.parts!r}; accepted: {accepted}")
    T, H, D = inputs.q.shape
    return form_fault(_plain(result), T, H, D)


def _plain(result: DcpSparseResult) -> SparsePrefillResult:
    """The result as one without max_logits."""
    return SparsePrefillResult(out=result.out, lse=result.lse)
