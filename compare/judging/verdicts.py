"""A verdict from a candidate's side and a reference's: what failed, what explains it, numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from compare.judging.against_oracle import flashmla_failures
from compare.judging.evidence import Evidence
from compare.judging.result_view import FormFault
from compare.judging.side_by_side import SideBySide
from compare.judging.sides import Side, measure, prefixed
from compare.protocol.verdict import Diagnosis, Status, Verdict

_SUSPECTS = 8
NO_ROWS = "there was nothing to compare: the case has no rows; shapes and dtypes are as due"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remarks:
    """What a suite says beside the numbers.

    diagnose: (candidate, tokens to look at first) -> the faults that its tensors show. details:
    sentences that a failing candidate gets besides. notes: what to know of the comparison.
    """

    diagnose: Callable[[Side, list[int]], tuple[Diagnosis, ...]]
    details: Callable[[Side], list[str]]
    notes: tuple[str, ...] = ()


def refusal(inputs: Any, fault: FormFault) -> Verdict:
    """The verdict on a result that can't be compared; inputs: of any suite with q [T, H, D]."""
    T, H, _ = inputs.q.shape
    return Verdict(status=fault.status, reason=fault.reason, rows_total=T * H)


def verdict_on(
    evidence: Evidence[Any],
    candidate: Side,
    reference: Side | FormFault | None,
    remarks: Remarks,
    *,
    profile: str,
) -> Verdict:
    """Measures candidate and reference and gives the verdict on the candidate.

    reference: None judges against the oracle alone, and so does one that can't be compared. A
    result without any row isn't compared: UNSUPPORTED.
    """
    reference_failed = reference.reason if isinstance(reference, FormFault) else None
    other = reference if isinstance(reference, Side) else None
    beside = None
    if other is not None:
        beside = SideBySide(candidate.view, other.view, candidate.contract)
    measure(evidence, (candidate,) if other is None else (candidate, other), beside)

    if other is not None and (said := other.failures(profile)):
        reference_failed = "; ".join(said)
    failures = candidate.failures(profile)
    if beside is not None and not reference_failed and profile != "calibrated":
        failed = flashmla_failures(beside.distances, "the reference", candidate.contract.whose)
        failures += prefixed(profile, failed)
    status = Status.PASS
    if failures:
        status = Status.SPECIAL if candidate.special.findings else Status.NUMERIC
        failures += remarks.details(candidate)
    elif not evidence.num_tokens:
        status, failures = Status.UNSUPPORTED, [NO_ROWS]
    elif not candidate.numbers.judged:
        status = Status.UNSUPPORTED
        failures = ["no row could be compared: what their inputs are due is not defined"]
    diagnosis: tuple[Diagnosis, ...] = ()
    # A result within the calibrated bounds agrees with the contract: nothing else explains it.
    if status is Status.SPECIAL or (failures and max(candidate.shares.values()) > 1.0):
        suspects = [*candidate.special.suspects[:_SUSPECTS], *candidate.numbers.suspects(_SUSPECTS)]
        diagnosis = remarks.diagnose(candidate, list(dict.fromkeys(suspects)))
    said = () if other is None else (f"reference: {note}" for note in other.notes)
    return Verdict(
        status=status,
        reason="; ".join(failures),
        share=None if status is Status.UNSUPPORTED else max(candidate.shares.values()),
        shares=candidate.shares,
        diagnosis=diagnosis,
        worst=candidate.worst(beside) if failures else (),
        against_oracle=candidate.numbers.metrics,
        against_reference=beside.metrics if beside else {},
        reference_against_oracle=other.numbers.metrics if other else {},
        torch_against_oracle=evidence.torch_against_oracle,
        rows_judged=candidate.numbers.judged,
        rows_total=evidence.num_tokens * evidence.heads,
        reference_failed=reference_failed,
        not_compared=tuple(
            n for n in candidate.contract.tolerances if n not in candidate.numbers.distances
        ),
        notes=(*candidate.notes, *said, *evidence.notes, *remarks.notes),
    )
