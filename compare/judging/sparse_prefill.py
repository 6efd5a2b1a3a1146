"""The judge of sparse prefill: shapes and dtypes, special values, then numbers, three ways.

Candidate and reference are each judged against the float64 oracle. Two results that are each within
their bound of the oracle are within the sum of both of one another, so the distance between them is
reported and needs no bound of its own; the flashmla profile, which has one, applies it as well. A
reference that is itself out of bounds is named, and the case is judged against the oracle alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64

from compare.cases.inputs import SparsePrefillInputs
from compare.judging.against_oracle import AgainstOracle, flashmla_failures
from compare.judging.diagnosis import diagnose
from compare.judging.evidence import Evidence, Rows
from compare.judging.exact_keys import key_difference
from compare.judging.metrics import Distance
from compare.judging.result_view import ResultView, check_form
from compare.judging.side_by_side import SideBySide
from compare.judging.special import SpecialValues
from compare.judging.threads import in_order
from compare.judging.tolerance import PROFILES
from compare.judging.verdict import Status, Verdict, Worst
from compare.run.result import SparsePrefillResult

__all__ = ["Evidence", "judge", "share_by_tensor"]

_SUSPECTS = 8


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
    if profile not in PROFILES:
        raise ValueError(f"profile: {profile!r}; accepted are {', '.join(PROFILES)}")
    rows_total = inputs.q.shape[0] * inputs.q.shape[1]
    if fault := check_form(inputs, candidate):
        return Verdict(status=fault.status, reason=fault.reason, rows_total=rows_total)
    evidence = evidence or Evidence(inputs)
    reference_failed = None
    if reference is not None and (fault := check_form(inputs, reference)):
        reference, reference_failed = None, fault.reason

    ours = _Side(ResultView(candidate), inputs)
    theirs = None if reference is None else _Side(ResultView(reference), inputs)
    sides = (ours,) if theirs is None else (ours, theirs)
    beside = None if theirs is None else SideBySide(ours.view, theirs.view)
    _measure(evidence, sides, beside)

    if theirs is not None and (said := theirs.failures(profile)):
        reference_failed = "; ".join(said)
    failures = ours.failures(profile)
    if beside is not None and not reference_failed and profile != "calibrated":
        failures += _prefixed(profile, flashmla_failures(beside.distances, "the reference"))
    status = Status.PASS
    if failures:
        status = Status.SPECIAL if ours.special.findings else Status.NUMERIC
    if failures and ours.numbers.exact and "out" in ours.numbers.calibrated_failures:
        failures += key_difference(evidence, ours.view, ours.numbers.worst["out"])
    found = ()
    # A result within the calibrated bounds agrees with the contract: nothing else explains it.
    if status is Status.SPECIAL or (failures and max(ours.shares.values()) > 1.0):
        suspects = [*ours.special.suspects[:_SUSPECTS], *ours.numbers.suspects(_SUSPECTS)]
        found = diagnose(evidence, ours.view, list(dict.fromkeys(suspects)), ours.special)
    return Verdict(
        status=status,
        reason="; ".join(failures),
        share=max(ours.shares.values()),
        shares=ours.shares,
        diagnosis=found,
        worst=ours.worst(beside) if failures else (),
        against_oracle=ours.numbers.metrics,
        against_reference=beside.metrics if beside else {},
        reference_against_oracle=theirs.numbers.metrics if theirs else {},
        torch_against_oracle=evidence.torch_against_oracle,
        rows_judged=ours.numbers.judged,
        rows_total=rows_total,
        reference_failed=reference_failed,
        not_compared=() if candidate.max_logits is not None else ("max_logits",),
        notes=(
            *candidate.notes,
            *(() if reference is None else (f"reference: {note}" for note in reference.notes)),
            *evidence.notes,
            *_profile_notes(inputs, profile),
        ),
    )


def share_by_tensor(
    inputs: SparsePrefillInputs, result: SparsePrefillResult, evidence: Evidence
) -> dict[str, float]:
    """The largest share of the calibrated bounds that a well-formed result uses, by tensor, and of
    "out tensor", the bound of out as a whole. inf where a special value is at the wrong place.
    """
    side = _Side(ResultView(result), inputs)
    _measure(evidence, (side,), None)
    return side.shares | {finding.tensor: math.inf for finding in side.special.findings}


class _Side:
    """A result with all that is held against it."""

    def __init__(self, view: ResultView, inputs: SparsePrefillInputs) -> None:
        self.view = view
        self.special = SpecialValues()
        exact = getattr(inputs.case, "data", None) == "exact"
        self.numbers = AgainstOracle(self.view, exact=exact)

    def fresh_numbers(self) -> AgainstOracle:
        """What the numbers of one more block are gathered in."""
        return AgainstOracle(self.view, exact=self.numbers.exact)

    @property
    def shares(self) -> dict[str, float]:
        """The largest share of its calibrated bound by tensor."""
        return {**self.numbers.shares, "out tensor": self.numbers.tensor_share}

    def failures(self, profile: str) -> list[str]:
        """Sentences: special values, then each profile that is asked for."""
        said = [finding.sentence for finding in self.special.findings]
        if profile != "flashmla":
            named = "calibrated" if profile == "both" else profile
            said += _prefixed(profile, self.numbers.calibrated_failures, named)
        if profile != "calibrated":
            said += _prefixed(profile, self.numbers.flashmla_failures)
        return said

    def worst(self, beside: SideBySide | None) -> tuple[Worst, ...]:
        """The places to look at: violated special values, then the worst element per tensor."""
        found = [f.first for f in self.special.findings if f.first is not None]
        found += [worst for worst in self.numbers.worst.values() if worst.share > 1.0]
        if not found:
            distances = [*self.numbers.distances.values()]
            distances += beside.distances.values() if beside else ()
            found = [_worst_element(d) for d in distances if d.worst_use >= 1.0]
        return tuple(found)


def _profile_notes(inputs: SparsePrefillInputs, profile: str) -> tuple[str, ...]:
    if profile == "calibrated" or getattr(inputs.case, "data", None) in ("flashmla", "exact"):
        return ()
    return (
        "FlashMLA's tolerances are made for its own data, a tenth of the size of N(0, 1): on other "
        "data right kernels may fall outside of abs 8e-4",
    )


def _worst_element(distance: Distance) -> Worst:
    got, expected = distance.worst_values
    return Worst(
        tensor=distance.tensor,
        index=distance.worst_at or (),
        got=got,
        expected=expected,
        share=distance.worst_use,
    )


def _prefixed(profile: str, failures: dict[str, str], name: str = "flashmla") -> list[str]:
    """With profile "both" each sentence says whose rule was broken."""
    return [f"{name}: {said}" if profile == "both" else said for said in failures.values()]


def _measure(evidence: Evidence, sides: tuple[_Side, ...], beside: SideBySide | None) -> None:
    """Special values and candidate beside reference in every row, and rows against the oracle: in
    one walk where it has every row, else its sample and the most different rows after the walk.
    """
    if evidence.complete:
        _walk(evidence, sides, beside, evidence.blocks(evidence.sample))
        return
    step = evidence.step
    every = np.arange(evidence.num_tokens)
    _walk(evidence, sides, beside, (every[at : at + step] for at in range(0, len(every), step)))
    tokens = evidence.sample
    if beside is not None:
        tokens = np.union1d(tokens, beside.most_different())
    _ask_the_oracle(evidence, sides, tokens)


def _walk(
    evidence: Evidence,
    sides: tuple[_Side, ...],
    beside: SideBySide | None,
    blocks: Iterable[Rows | Int64[np.ndarray, " n"]],
) -> None:
    """All that is to be said about blocks of tokens, each carried to the device once; of a block
    that comes as Rows, what the oracle says too.
    """

    def look(
        block: Rows | Int64[np.ndarray, " n"],
    ) -> tuple[list[SpecialValues], list[AgainstOracle], SideBySide | None]:
        rows = block if isinstance(block, Rows) else None
        tokens = block.tokens if isinstance(block, Rows) else block
        kinds = evidence.keys.rows(tokens) if rows is None else rows.kinds
        outs = [side.view.block(tokens, evidence.device) for side in sides]
        special = [SpecialValues() for side in sides]
        numbers = [] if rows is None else [side.fresh_numbers() for side in sides]
        for found, side, out in zip(special, sides, outs, strict=True):
            found.add(tokens, kinds, side.view, out)
        if rows is not None:
            for found, out in zip(numbers, outs, strict=True):
                found.add(rows, out)
        if beside is None:
            return special, numbers, None
        both = SideBySide(sides[0].view, sides[1].view)
        both.add(tokens, kinds, *outs)
        return special, numbers, both

    for special, numbers, both in in_order(look, blocks, evidence.device):
        for side, found in zip(sides, special, strict=True):
            side.special.merge(found)
        for side, found in zip(sides, numbers, strict=False):
            side.numbers.merge(found)
        if beside is not None and both is not None:
            beside.merge(both)


def _ask_the_oracle(
    evidence: Evidence, sides: tuple[_Side, ...], tokens: Int64[np.ndarray, " n"]
) -> None:
    """The rows of these tokens against the oracle."""

    def measure(rows: Rows) -> list[AgainstOracle]:
        found = [side.fresh_numbers() for side in sides]
        for numbers, side in zip(found, sides, strict=True):
            numbers.add(rows, side.view.block(rows.tokens, evidence.device))
        return found

    for found in in_order(measure, evidence.blocks(tokens), evidence.device):
        for side, numbers in zip(sides, found, strict=True):
            side.numbers.merge(numbers)
