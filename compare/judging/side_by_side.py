"""Candidate beside reference, over every row that both have, with or without the oracle."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from compare.judging.evidence import places_of, row_norm
from compare.judging.metrics import Distance, to_float64
from compare.judging.result_view import ResultView
from compare.judging.tolerance import FLASHMLA
from compare.judging.verdict import TensorMetrics

MOST_DIFFERENT = 32
"""Tokens per tensor that are handed to the oracle because the two results differ most there."""


class SideBySide:
    """Fed with blocks of tokens; knows the distances, and where they are largest."""

    def __init__(self, candidate: ResultView, reference: ResultView) -> None:
        self._candidate = candidate
        self._reference = reference
        self.distances = {name: Distance(name, rule) for name, rule in FLASHMLA.items()}
        if candidate.result.max_logits is None or reference.result.max_logits is None:
            del self.distances["max_logits"]
        self._tokens: list[np.ndarray] = []
        self._differences: dict[str, list[np.ndarray]] = {name: [] for name in self.distances}

    def add(
        self,
        tokens: Int64[np.ndarray, " n"],
        nan_score: np.ndarray,
        undefined: np.ndarray,
    ) -> None:
        """One block; nan_score and undefined [n, H] as in RowKinds."""
        heads = self._candidate.heads
        places = places_of(tokens, heads)
        self._tokens.append(tokens)
        mine, theirs = self._candidate.statistics(tokens), self._reference.statistics(tokens)
        for name in self.distances.keys() - {"out"}:
            a, r = mine[name], theirs[name]
            skip = undefined | (nan_score if name == "max_logits" else False)
            self.distances[name].add(a.ravel(), r.ravel(), places, skip.ravel())
            difference = np.where(skip, 0.0, _difference(to_float64(a), to_float64(r)))
            scale = np.maximum(1.0, np.abs(np.where(np.isfinite(r), r, 0.0)))
            self._differences[name].append((difference / scale).max(axis=1, initial=0.0))
        at, a = self._candidate.out(tokens)
        at_reference, r = self._reference.out(tokens)
        if len(at) != len(at_reference) or (at != at_reference).any():
            at, first, second = np.intersect1d(
                at, at_reference, assume_unique=True, return_indices=True
            )
            a, r = a[first], r[second]
        skip = undefined.ravel()[at]
        self.distances["out"].add(a, r, places[at], skip)
        a, r = to_float64(a), to_float64(r)
        apart = row_norm(_difference(a, r))
        length = row_norm(np.where(np.isfinite(r), r, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = np.where(skip | (apart == 0.0), 0.0, apart / length)
        largest = np.zeros(len(tokens))
        np.maximum.at(largest, at // heads, relative)
        self._differences["out"].append(largest)

    def merge(self, later: SideBySide) -> None:
        """Takes in what was found in blocks that come after its own."""
        for name, distance in later.distances.items():
            self.distances[name].merge(distance)
            self._differences[name] += later._differences[name]
        self._tokens += later._tokens

    @property
    def metrics(self) -> dict[str, TensorMetrics]:
        return {name: distance.metrics() for name, distance in self.distances.items()}

    def most_different(self) -> Int64[np.ndarray, " m"]:
        """The 32 tokens where out differs most, and as many for each statistic, ascending."""
        if not self._tokens:
            return np.zeros(0, np.int64)
        tokens = np.concatenate(self._tokens)
        chosen = [
            tokens[np.argsort(-np.concatenate(parts), kind="stable")[:MOST_DIFFERENT]]
            for parts in self._differences.values()
        ]
        return np.unique(np.concatenate(chosen))


def _difference(
    a: Float64[np.ndarray, "*shape"], r: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    """|a - r|; 0 for equal special values, inf where only one is special."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - r)
    same = (a == r) | (np.isnan(a) & np.isnan(r))
    return np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
