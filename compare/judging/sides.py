"""Results with all that is held against them, and the one walk over their rows that finds it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Int64

from compare.judging.against_oracle import AgainstOracle
from compare.judging.contract import PREFILL, Contract
from compare.judging.evidence import Evidence
from compare.judging.metrics import Distance
from compare.judging.result_view import ResultView
from compare.judging.rows import Rows
from compare.judging.side_by_side import SideBySide
from compare.judging.special import SpecialValues
from compare.judging.threads import in_order
from compare.protocol.case import Case
from compare.protocol.verdict import Worst


class Side:
    """A result with all that is held against it. notes: what its adapter did."""

    def __init__(
        self,
        view: ResultView,
        case: Case | None,
        contract: Contract = PREFILL,
        *,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.view = view
        self.notes = notes
        self.contract = contract
        self.exact = getattr(case, "data", None) == "exact"
        self.special = self.fresh_special()
        self.numbers = self.fresh_numbers()

    def fresh_special(self) -> SpecialValues:
        """What the special values of one more block are gathered in."""
        return SpecialValues(self.contract)

    def fresh_numbers(self) -> AgainstOracle:
        """What the numbers of one more block are gathered in."""
        return AgainstOracle(self.view, exact=self.exact, contract=self.contract)

    @property
    def shares(self) -> dict[str, float]:
        """The largest share of its calibrated bound by tensor."""
        return {**self.numbers.shares, "out tensor": self.numbers.tensor_share}

    def failures(self, profile: str) -> list[str]:
        """Sentences: special values, then each profile that is asked for."""
        said = [finding.sentence for finding in self.special.findings]
        if profile != "flashmla":
            named = "calibrated" if profile == "both" else profile
            said += prefixed(profile, self.numbers.calibrated_failures, named)
        if profile != "calibrated":
            said += prefixed(profile, self.numbers.flashmla_failures)
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


def _worst_element(distance: Distance) -> Worst:
    got, expected = distance.worst_values
    return Worst(
        tensor=distance.tensor,
        index=distance.worst_at or (),
        got=got,
        expected=expected,
        share=distance.worst_use,
    )


def prefixed(profile: str, failures: dict[str, str], name: str = "flashmla") -> list[str]:
    """With profile "both" each sentence says whose rule was broken."""
    return [f"{name}: {said}" if profile == "both" else said for said in failures.values()]


def measure(evidence: Evidence[Any], sides: tuple[Side, ...], beside: SideBySide | None) -> None:
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


def share_by_tensor(evidence: Evidence[Any], side: Side) -> dict[str, float]:
    """The largest share of the calibrated bounds that a well-formed result uses, by tensor, and of
    "out tensor", the bound of out as a whole. inf where a special value is at the wrong place.
    """
    measure(evidence, (side,), None)
    return side.shares | {finding.tensor: math.inf for finding in side.special.findings}


def _walk(
    evidence: Evidence[Any],
    sides: tuple[Side, ...],
    beside: SideBySide | None,
    blocks: Iterable[Rows | Int64[np.ndarray, " n"]],
) -> None:
    """Looks at blocks of tokens, each carried to the device once; at a block that comes as Rows
    against the oracle too.
    """

    def look(
        block: Rows | Int64[np.ndarray, " n"],
    ) -> tuple[list[SpecialValues], list[AgainstOracle], SideBySide | None]:
        rows = block if isinstance(block, Rows) else None
        tokens = block.tokens if isinstance(block, Rows) else block
        kinds = evidence.witness.kinds(tokens) if rows is None else rows.kinds
        outs = [side.view.block(tokens, evidence.device) for side in sides]
        special = [side.fresh_special() for side in sides]
        numbers = [] if rows is None else [side.fresh_numbers() for side in sides]
        for found, side, out in zip(special, sides, outs, strict=True):
            found.add(tokens, kinds, side.view, out)
        if rows is not None:
            for found, out in zip(numbers, outs, strict=True):
                found.add(rows, out)
        if beside is None:
            return special, numbers, None
        both = SideBySide(sides[0].view, sides[1].view, sides[0].contract)
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
    evidence: Evidence[Any], sides: tuple[Side, ...], tokens: Int64[np.ndarray, " n"]
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
