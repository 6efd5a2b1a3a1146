"""A verdict from two sides that have been measured: what failed, what explains it, and numbers."""

from __future__ import annotations

from collections.abc import Callable

from compare.judging.against_oracle import flashmla_failures
from compare.judging.evidence import Evidence
from compare.judging.side_by_side import SideBySide
from compare.judging.sides import Side, measure, prefixed
from compare.protocol.verdict import Diagnosis, Status, Verdict

_SUSPECTS = 8
_NO_ROWS = "there was nothing to compare: the case has no rows; shapes and dtypes are as due"

Explain = Callable[[Side, list[int]], tuple[Diagnosis, ...]]
"""(candidate, tokens to look at first) -> the faults that its tensors show."""


def weigh(
    evidence: Evidence,
    ours: Side,
    theirs: Side | None,
    *,
    profile: str,
    reference_failed: str | None,
    explain: Explain,
    more: Callable[[Side], list[str]],
    notes: tuple[str, ...],
    not_compared: tuple[str, ...] = (),
    rowless: Status = Status.UNSUPPORTED,
) -> Verdict:
    """Measures both sides and says what is to be said.

    theirs: the reference's side; None judges against the oracle alone. reference_failed: a sentence
    where the reference can't be compared at all. more: sentences that a failing candidate gets
    besides. rowless: what a well-formed result without any row is; a result of which nothing else
    is compared either must not count as compared.
    """
    sides = (ours,) if theirs is None else (ours, theirs)
    beside = None if theirs is None else SideBySide(ours.view, theirs.view, ours.contract)
    measure(evidence, sides, beside)

    if theirs is not None and (said := theirs.failures(profile)):
        reference_failed = "; ".join(said)
    failures = ours.failures(profile)
    if beside is not None and not reference_failed and profile != "calibrated":
        failed = flashmla_failures(beside.distances, "the reference", ours.contract.whose)
        failures += prefixed(profile, failed)
    status = Status.PASS
    if failures:
        status = Status.SPECIAL if ours.special.findings else Status.NUMERIC
        failures += more(ours)
    elif not evidence.num_tokens:
        status = rowless
        failures = [] if status is Status.PASS else [_NO_ROWS]
    elif not ours.numbers.judged:
        status = Status.UNSUPPORTED
        failures = ["no row could be compared: what their inputs are due is not defined"]
    found: tuple[Diagnosis, ...] = ()
    # A result within the calibrated bounds agrees with the contract: nothing else explains it.
    if status is Status.SPECIAL or (failures and max(ours.shares.values()) > 1.0):
        suspects = [*ours.special.suspects[:_SUSPECTS], *ours.numbers.suspects(_SUSPECTS)]
        found = explain(ours, list(dict.fromkeys(suspects)))
    return Verdict(
        status=status,
        reason="; ".join(failures),
        share=None if status is Status.UNSUPPORTED else max(ours.shares.values()),
        shares=ours.shares,
        diagnosis=found,
        worst=ours.worst(beside) if failures else (),
        against_oracle=ours.numbers.metrics,
        against_reference=beside.metrics if beside else {},
        reference_against_oracle=theirs.numbers.metrics if theirs else {},
        torch_against_oracle=evidence.torch_against_oracle,
        rows_judged=ours.numbers.judged,
        rows_total=evidence.num_tokens * evidence.heads,
        reference_failed=reference_failed,
        not_compared=not_compared,
        notes=notes,
    )
