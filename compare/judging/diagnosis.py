"""Names of faults, from the tensors alone.

A bounded sample of tokens, the worst ones among them, is held against each hypothesis. One gets
its name if it is a change that these inputs can show, the candidate agrees with it in every tensor
that it changes, and the candidate doesn't agree with the contract there. Tensors that a hypothesis
leaves alone say nothing about it, so two faults in different tensors are both named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, Hypothesis, Sample, hypotheses
from compare.judging.metrics import to_float64
from compare.judging.result_view import ResultView
from compare.judging.rows import OracleRows, row_norm
from compare.judging.special import SpecialValues
from compare.judging.tolerance import OUT_FLOOR, P_ROUNDING
from compare.protocol.verdict import Diagnosis

_MOST_TOKENS = 24
_FLOP = 2e10
"""Of all hypotheses together: seconds on a CPU."""
_ORACLE_RUNS = 14

_CLEARLY_WORSE = 1.05
"""A hypothesis whose error is this much larger than another's is given up for the other. Noise is
averaged over thousands of elements, where this is far outside of it."""

_STATISTIC = 1e-5
_TENSORS = ("out", "lse", "max_logits")


def diagnose(
    table: Iterable[Fault],
    evidence: Evidence[Any],
    view: ResultView,
    suspects: list[int],
    special: SpecialValues,
) -> tuple[Diagnosis, ...]:
    """The faults of a table that a failing candidate's tensors show; () where none explains them.

    suspects: tokens to look at first. A hypothesis that another one explains as well is flagged in
    its sentence.
    """
    shown = shown_by_special_values(table, special)
    sample = sample_of(evidence, suspects)
    if sample is None:
        return tuple(shown)
    possible = hypotheses(table, sample, view, evidence.inputs)
    return (*shown, *explanations(sample, view, possible))


def shown_by_special_values(table: Iterable[Fault], special: SpecialValues) -> list[Diagnosis]:
    """The faults that the special values of rows tell."""
    return [
        Diagnosis(name=fault.name, sentence=fault.words.format(count=count))
        for fault in table
        if fault.count is not None and (count := fault.count(special))
    ]


def sample_of(
    evidence: Evidence[Any], suspects: list[int], *, oracle_runs: int = _ORACLE_RUNS
) -> Sample | None:
    """The tokens on which hypotheses are tried, suspects first; None where there are none.

    oracle_runs: how many hypotheses run the oracle on them, about.
    """
    tokens = _tokens(evidence, suspects, oracle_runs)
    return Sample(evidence=evidence, tokens=tokens) if len(tokens) else None


def explanations(
    sample: Sample, view: ResultView, possible: Iterable[Hypothesis]
) -> list[Diagnosis]:
    """Those of the hypotheses that explain the candidate, and no other explains better."""
    found: list[Diagnosis] = []
    trial = _Trial(sample, view)
    fits = [fit for h in possible if (fit := trial.fit(h)) is not None]
    fits = [fit for fit in fits if not any(other.beats(fit) for other in fits)]
    for fit in fits:
        rivals = {o.hypothesis.name for o in fits if o.shares(fit)} - {fit.hypothesis.name}
        either = f" (or {', '.join(sorted(rivals))}: these inputs can't tell)" if rivals else ""
        if fit.hypothesis.name not in {d.name for d in found}:
            found.append(
                Diagnosis(name=fit.hypothesis.name, sentence=fit.hypothesis.sentence + either)
            )
    if not any(d.name == "lse-base-2" for d in found) and trial.lse_is_transposed():
        found.append(
            Diagnosis(
                name="lse-transposed",
                sentence="lse holds [H, T] read as [T, H]; it must be transposed, not reshaped",
            )
        )
    return found


def _tokens(
    evidence: Evidence[Any], suspects: list[int], oracle_runs: int
) -> Int64[np.ndarray, " n"]:
    """Suspects first, then tokens spread over the sample; ascending."""
    flop_per_token = evidence.witness.flop / max(evidence.num_tokens, 1)
    most = int(np.clip(_FLOP / max(oracle_runs * flop_per_token, 1.0), 2, _MOST_TOKENS))
    spread = evidence.sample[:: max(1, len(evidence.sample) // _MOST_TOKENS)]
    first = suspects[: max(1, most // 2)]
    chosen = list(dict.fromkeys([*first, *spread.tolist()]))[:most]
    return np.array(sorted(chosen), np.int64)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Fit:
    """A hypothesis that explains the candidate: the squared error of each row in what it changes,
    NaN of rows that it says nothing about.
    """

    hypothesis: Hypothesis
    errors: dict[str, np.ndarray]

    def shares(self, other: _Fit) -> bool:
        """Whether both speak about some tensor."""
        return bool(self.errors.keys() & other.errors.keys())

    def beats(self, other: _Fit) -> bool:
        """Whether this one is clearly closer to the candidate in a tensor that both explain, or
        explains more tensors or rows with the same errors.
        """
        common = [name for name in _TENSORS if name in self.errors and name in other.errors]
        if not common or other is self:
            return False
        mine, theirs = self.errors[common[0]], other.errors[common[0]]
        told, told_theirs = ~np.isnan(mine), ~np.isnan(theirs)
        both = told & told_theirs
        if (mine[both] == theirs[both]).all():
            return self.errors.keys() > other.errors.keys() or bool(
                (told >= told_theirs).all() and (told > told_theirs).any()
            )
        return float(theirs[both].sum()) > float(mine[both].sum()) * _CLEARLY_WORSE**2


class _Trial:
    """The candidate on the sample, and how it agrees with what a hypothesis expects."""

    def __init__(self, sample: Sample, view: ResultView) -> None:
        self.sample = sample
        self.view = view
        self.at, out = view.out(sample.tokens)
        self.got = {"out": to_float64(out)}
        for name, values in view.statistics(sample.tokens).items():
            self.got[name] = to_float64(values).ravel()
        self.kinds = sample.evidence.witness.kinds(sample.tokens)
        self.copies = np.sqrt(np.maximum(self.kinds.facts.copies, 1))[:, None]

    def fit(self, hypothesis: Hypothesis) -> _Fit | None:
        """None unless the hypothesis explains the candidate."""
        expected = hypothesis.rows()
        told = np.ones(len(self.sample.tokens), bool)
        if hypothesis.silent is not None:
            told = ~hypothesis.silent()
        told = np.repeat(told, self.sample.evidence.heads)
        errors: dict[str, np.ndarray] = {}
        explained = False
        for name in self.got:
            here = told[self.at] if name == "out" else told
            changed = self._apart(name, self._of(name, self.sample.contract), expected) & here
            if not changed.any():
                continue
            wrong = self._apart(name, self.got[name], expected) & here
            if wrong.any():
                return None
            changed &= self._apart(name, self.got[name], self.sample.contract)
            if hypothesis.by_value:
                changed &= ~np.isnan(np.atleast_2d(self._of(name, expected).T)).any(axis=0)
            explained |= bool(changed.any())
            errors[name] = np.where(here, self._square_error(name, expected), np.nan)
        return _Fit(hypothesis=hypothesis, errors=errors) if explained else None

    def _of(self, name: str, rows: OracleRows) -> np.ndarray:
        values = getattr(rows, name)
        return values.reshape(-1, values.shape[-1])[self.at] if name == "out" else values.ravel()

    def _apart(self, name: str, got: np.ndarray, rows: OracleRows) -> np.ndarray:
        """bool per row: got doesn't agree with these rows."""
        expected = self._of(name, rows)
        lse = rows.lse.ravel()
        skip = self.kinds.undefined.ravel()
        if name == "out":
            norm = row_norm(np.where(np.isfinite(expected), expected, 0.0))
            spread = (self.copies * rows.p2).ravel()[self.at]
            allowed = P_ROUNDING * (norm + 2.0 * np.nan_to_num(spread)) + OUT_FLOOR
            nan = np.isnan(got) != np.isnan(expected)
            with np.errstate(invalid="ignore"):
                difference = row_norm(np.nan_to_num(got - expected, nan=0.0))
            return ((difference > allowed) | nan.any(axis=1)) & ~skip[self.at]
        if name == "max_logits":
            skip = skip | np.isnan(lse)
        # Which infinity an empty row has is a question of its own.
        empty = np.isinf(lse) & ~np.isnan(expected)
        contract_empty = np.repeat(self.kinds.empty, self.sample.evidence.heads)
        with np.errstate(invalid="ignore"):
            allowed = _STATISTIC * np.maximum(1.0, np.abs(expected))
            close = np.abs(got - expected) <= allowed
        agrees = close | (np.isnan(got) & np.isnan(expected)) | (empty & np.isinf(got))
        return ~(agrees | skip | (empty & contract_empty))

    def _square_error(self, name: str, rows: OracleRows) -> Float64[np.ndarray, " m"]:
        """Of each row."""
        expected, got = self._of(name, rows), self.got[name]
        with np.errstate(invalid="ignore"):
            difference: Float64[np.ndarray, "..."] = got - expected
        square = np.where(np.isfinite(difference), difference, 0.0) ** 2
        return square.sum(axis=1) if name == "out" else square

    def lse_is_transposed(self) -> bool:
        """Whether the whole lse is the right one with its axes reshaped instead of swapped."""
        evidence, view = self.sample.evidence, self.view
        T, H = view.result.lse.shape
        if not evidence.complete or T == 1 or H == 1:
            return False
        right = np.concatenate([rows.lse for rows in evidence.blocks(evidence.sample)])
        with np.errstate(invalid="ignore"):
            close = np.isclose(view.result.lse, right.T.reshape(T, H), 1e-5, 1e-5, equal_nan=True)
            same = np.isclose(view.result.lse, right, 1e-5, 1e-5, equal_nan=True)
        return bool(close.all() and not same.all())
