"""Candidate beside reference, over every row that both have, with or without the oracle."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float64, Int64

from compare.judging.contract import PREFILL, Contract
from compare.judging.device import to_numpy, upload
from compare.judging.elements import Pair, row_norm
from compare.judging.metrics import Distance
from compare.judging.result_view import OutBlock, ResultView
from compare.judging.row_kinds import RowKinds
from compare.judging.rows import places_of
from compare.protocol.verdict import TensorMetrics

MOST_DIFFERENT = 32
"""Tokens per tensor that are handed to the oracle because the two results differ most there."""


class SideBySide:
    """Fed with blocks of tokens; knows the distances, and where they are largest."""

    def __init__(
        self, candidate: ResultView, reference: ResultView, contract: Contract = PREFILL
    ) -> None:
        self._candidate = candidate
        self._reference = reference
        self.distances = {n: Distance(n, rule) for n, rule in contract.tolerances.items()}
        if candidate.result.max_logits is None or reference.result.max_logits is None:
            self.distances.pop("max_logits", None)
        self._tokens: list[np.ndarray] = []
        self._differences: dict[str, list[np.ndarray]] = {name: [] for name in self.distances}

    def add(
        self,
        tokens: Int64[np.ndarray, " n"],
        kinds: RowKinds,
        out: OutBlock,
        reference: OutBlock,
    ) -> None:
        """One block; out and reference: its rows as each side's view gives them."""
        heads = self._candidate.heads
        places = places_of(tokens, heads)
        self._tokens.append(tokens)
        mine, theirs = self._candidate.statistics(tokens), self._reference.statistics(tokens)
        for name in self.distances.keys() - {"out"}:
            skip = kinds.undefined | (kinds.nan_score if name == "max_logits" else False)
            pair = Pair(*(upload(side[name].ravel(), None) for side in (mine, theirs)), _mask(skip))
            self.distances[name].add(pair, places)
            scale = np.maximum(1.0, np.abs(to_numpy(pair.expected)))
            apart = (_apart(pair) / scale).reshape(-1, heads)
            self._differences[name].append(apart.max(axis=1, initial=0.0))
        at, a, r = out.at, out.values, reference.values
        if len(at) != len(reference.at) or (at != reference.at).any():
            at, first, second = np.intersect1d(
                at, reference.at, assume_unique=True, return_indices=True
            )
            a, r = (
                rows[torch.from_numpy(chosen).to(rows.device)]
                for rows, chosen in ((a, first), (r, second))
            )
        largest = np.zeros(len(tokens))
        if len(at):
            pair = Pair(a, r, _mask(kinds.undefined.ravel()[at], a.device))
            self.distances["out"].add(pair, places[at])
            apart, length = _apart(pair), to_numpy(row_norm(pair.expected))
            with np.errstate(invalid="ignore", divide="ignore"):
                relative = np.where(apart == 0.0, 0.0, apart / length)
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


def _apart(pair: Pair) -> Float64[np.ndarray, " m"]:
    """|a - r| of each row; inf where only one of them has a special value."""
    apart = to_numpy(pair.row_error)
    return apart if pair.one_sided is None else np.where(to_numpy(pair.one_sided), np.inf, apart)


def _mask(skip: np.ndarray, device: torch.device | None = None) -> torch.Tensor | None:
    """Rows to skip as a tensor; None where there are none."""
    return torch.from_numpy(skip.ravel()).to(device) if skip.any() else None
