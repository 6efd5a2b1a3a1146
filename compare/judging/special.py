"""Special values come first and exactly: NaN, infinities and exact zeros at their places, in all
rows of a result, whatever the tolerance.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Int64

from compare.judging.result_view import ResultView
from compare.judging.row_kinds import RowKinds
from compare.judging.verdict import Worst

SUSPECTS = 64


@dataclasses.dataclass(kw_only=True)
class Finding:
    """All violations of one rule in one tensor: how often, and the first place with its value."""

    tensor: str
    rule: str
    expected: float
    count: int = 0
    first: Worst | None = None

    @property
    def sentence(self) -> str:
        assert self.first is not None
        place = ", ".join(map(str, self.first.index))
        return (
            f"{self.tensor}[{place}] is {self.first.got:g}; {self.rule} "
            f"({self.count} {'element' if self.count == 1 else 'elements'})"
        )


class SpecialValues:
    """Collects violations block by block; `findings` is empty for a result that keeps the rules."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str], Finding] = {}
        self.minus_inf_at_empty = 0
        self.suspects: list[int] = []
        """Tokens with a violation, the first 64."""

    @property
    def findings(self) -> list[Finding]:
        return list(self._findings.values())

    def add(self, tokens: Int64[np.ndarray, " n"], kinds: RowKinds, view: ResultView) -> None:
        """One block of tokens."""
        statistics = view.statistics(tokens)
        self._statistic(tokens, kinds, "lse", statistics["lse"])
        if "max_logits" in statistics:
            self._statistic(tokens, kinds, "max_logits", statistics["max_logits"])
        places, out = view.out(tokens)
        unusual = _not_finite(out)
        if kinds.ordinary and not unusual.any():
            return
        at = np.stack([tokens[places // view.heads], places % view.heads], axis=1)
        nan_out, zero_out, undefined = (
            mask.ravel()[places] for mask in (kinds.nan_out, kinds.zero_out, kinds.undefined)
        )
        empty = np.repeat(kinds.empty, view.heads)[places]
        finite = ~(nan_out | zero_out | undefined)
        for rows, rule, expected, wrong in (
            (nan_out, "NaN is due: a NaN in q, a referenced key or the sink", math.nan, _not_nan),
            (zero_out & empty, "0 is due: the row has no valid slot", 0.0, _not_zero),
            (zero_out & ~empty, "0 is due: the sink is +inf", 0.0, _not_zero),
            (finite, "a finite value is due", math.nan, _not_finite),
        ):
            if rows.any():
                self._note("out", rule, expected, at[rows], out[rows], wrong(out[rows]))

    def merge(self, later: SpecialValues) -> None:
        """Takes in what was found in blocks that come after its own."""
        for key, finding in later._findings.items():
            mine = self._findings.setdefault(key, finding)
            if mine is not finding:
                mine.count += finding.count
        self.minus_inf_at_empty += later.minus_inf_at_empty
        self._suspect(later.suspects)

    def _suspect(self, tokens: list[int]) -> None:
        room = SUSPECTS - len(self.suspects)
        self.suspects += [token for token in tokens if token not in self.suspects][:room]

    def _statistic(self, tokens: np.ndarray, kinds: RowKinds, tensor: str, got: np.ndarray) -> None:
        value = math.inf if tensor == "lse" else -math.inf
        empty = np.broadcast_to(kinds.empty[:, None], got.shape)
        nan = kinds.nan_score
        finite = ~(empty | nan | kinds.undefined)
        place = np.stack(np.broadcast_arrays(tokens[:, None], np.arange(got.shape[1])), axis=-1)

        def note(rows: np.ndarray, rule: str, expected: float, wrong: np.ndarray) -> None:
            self._note(tensor, rule, expected, place, got, rows & wrong)

        sign = "+inf" if value > 0 else "-inf"
        note(empty, f"{sign} is due: the row has no valid slot", value, got != value)
        note(finite, "a finite value is due", math.nan, ~np.isfinite(got))
        if tensor == "lse":
            note(nan, "NaN is due: a NaN in q or in a referenced key", math.nan, ~np.isnan(got))
            self.minus_inf_at_empty += int(np.count_nonzero(empty & np.isneginf(got)))

    def _note(
        self,
        tensor: str,
        rule: str,
        expected: float,
        places: np.ndarray,
        got: np.ndarray,
        wrong: np.ndarray,
    ) -> None:
        if not wrong.any():
            return
        finding = self._findings.setdefault(
            (tensor, rule), Finding(tensor=tensor, rule=rule, expected=expected)
        )
        finding.count += int(np.count_nonzero(wrong))
        index = np.argwhere(wrong)
        axes = places.ndim - 1
        if finding.first is None:
            row = tuple(index[0])
            finding.first = Worst(
                tensor=tensor,
                index=(*map(int, places[row[:axes]]), *map(int, row[axes:])),
                got=float(got[row]),
                expected=expected,
                share=math.inf,
            )
        tokens = np.unique(places[tuple(index[:, :axes].T)][:, 0])
        self._suspect(tokens[:SUSPECTS].tolist())


def _bits(out: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(out).view(np.uint16) & np.uint16(0x7FFF)


def _not_nan(out: np.ndarray) -> np.ndarray:
    return _bits(out) <= 0x7F80


def _not_zero(out: np.ndarray) -> np.ndarray:
    return _bits(out) != 0


def _not_finite(out: np.ndarray) -> np.ndarray:
    return _bits(out) >= 0x7F80
