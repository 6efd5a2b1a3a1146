"""One result against the oracle: shares of the calibrated bounds, the worst places, metrics."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from jaxtyping import BFloat16, Float64, Int64, Shaped

from compare.judging.contract import PREFILL, Contract
from compare.judging.device import to_numpy, upload
from compare.judging.elements import Pair, round_to_bfloat16, row_norm, ulp_distance
from compare.judging.metrics import Distance
from compare.judging.result_view import OutBlock, ResultView
from compare.judging.rows import Rows, places_of
from compare.judging.tolerance import (
    FEW_ROWS,
    OUT_FLOOR,
    TENSOR_ROUNDING,
    tensor_bound,
    ulp,
)
from compare.protocol.verdict import TensorMetrics, Worst


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _OutRows:
    """Rows of out against the oracle: their places in the block, share, error and bound of each,
    and of each element the difference and what is expected.
    """

    at: Int64[np.ndarray, " m"]
    share: Float64[np.ndarray, " m"]
    error: Float64[np.ndarray, " m"]
    bound: Float64[np.ndarray, " m"]
    difference: Shaped[torch.Tensor, "m 512"]
    expected: Shaped[torch.Tensor, "m 512"]


class AgainstOracle:
    """Fed with blocks of rows; then `shares`, `worst`, `failures` and `metrics` are known."""

    def __init__(self, view: ResultView, *, exact: bool, contract: Contract = PREFILL) -> None:
        """exact: the inputs are made so that nothing rounds; see tolerance.py."""
        self.view = view
        self.exact = exact
        self.contract = contract
        self.distances = {n: Distance(n, rule) for n, rule in contract.tolerances.items()}
        if view.result.max_logits is None:
            self.distances.pop("max_logits", None)
        self.shares = dict.fromkeys(self.distances, 0.0)
        self.worst: dict[str, Worst] = {}
        self.judged = 0
        self._allowed: dict[str, str] = {}
        self._tokens: list[np.ndarray] = []
        self._token_shares: list[np.ndarray] = []
        self._error = self._torch_error = self._expected = self._part_rounding = 0.0
        self._out_rows = 0

    def add(self, rows: Rows, out: OutBlock) -> None:
        """One block; out: its rows as `view.block` gives them. Rows with a special value due take
        part in the metrics only.
        """
        heads = self.view.heads
        places = places_of(rows.tokens, heads)
        kinds = rows.kinds
        self.judged += int(np.count_nonzero(~kinds.undefined))
        per_row = np.zeros(len(places))
        for name, got in self.view.statistics(rows.tokens).items():
            skip = kinds.undefined | (kinds.nan_score if name == "max_logits" else False)
            expected = torch.from_numpy(getattr(rows, name).ravel())
            pair = Pair(upload(got.ravel(), None), expected, torch.from_numpy(skip.ravel()))
            self.distances[name].add(pair, places)
            compared = ~(kinds.undefined | kinds.nan_score | kinds.empty[:, None])
            compared &= np.isfinite(got)
            share = self._statistic(name, got, rows, compared).ravel()
            per_row = np.maximum(per_row, share)

        at = out.at
        if len(at):
            skip = torch.from_numpy(kinds.undefined.ravel()[at]).to(out.values.device)
            pair = Pair(out.values, out.of(rows.oracle_out.flatten(0, 1)), skip)
            self.distances["out"].add(pair, places[at])
            compared = ~(kinds.undefined | kinds.nan_out | kinds.zero_out).ravel()[at]
            share = self._out(pair, rows, at, compared)
            per_row[at] = np.maximum(per_row[at], share)

        self._tokens.append(rows.tokens)
        self._token_shares.append(per_row.reshape(-1, heads).max(axis=1))

    def merge(self, later: AgainstOracle) -> None:
        """Takes in what was found in blocks that come after its own."""
        for name, distance in later.distances.items():
            self.distances[name].merge(distance)
            if later.shares[name] > self.shares[name]:
                self.shares[name] = later.shares[name]
                self.worst[name] = later.worst[name]
                self._allowed[name] = later._allowed[name]
        self.judged += later.judged
        self._tokens += later._tokens
        self._token_shares += later._token_shares
        self._error += later._error
        self._torch_error += later._torch_error
        self._expected += later._expected
        self._part_rounding += later._part_rounding
        self._out_rows += later._out_rows

    def _statistic(
        self, name: str, got: np.ndarray, rows: Rows, compared: np.ndarray
    ) -> np.ndarray:
        expected = getattr(rows, name)
        bound = getattr(rows.bounds, name)
        if self.exact:
            lse_bound = self.contract.exact_lse_ulps * ulp(expected)
            bound = lse_bound if name == "lse" else np.zeros_like(expected)
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.abs(got.astype(np.float64) - expected)
            share = np.where(compared & (error > 0.0), error / bound, 0.0)
        worst = np.unravel_index(share.argmax(), share.shape)
        if share[worst] > self.shares[name]:
            self.shares[name] = float(share[worst])
            self.worst[name] = Worst(
                tensor=name,
                index=(int(rows.tokens[worst[0]]), int(worst[1])),
                got=float(got[worst]),
                expected=float(expected[worst]),
                share=float(share[worst]),
            )
            rule = "2 x torch + 4 ulp + drift"
            if self.exact:
                rule = f"{self.contract.exact_lse_ulps:g} ulp of ln(count)"
            if self.exact and name == "max_logits":
                rule = "exact data: 0"
            self._allowed[name] = (
                f"the error is {error[worst]:.3g}, allowed is {bound[worst]:.3g} ({rule})"
            )
        return share

    def _out(self, pair: Pair, rows: Rows, at: np.ndarray, compared: np.ndarray) -> np.ndarray:
        error = to_numpy(pair.row_error)
        flushed = rows.bounds.flushed.ravel()[at] & compared
        if flushed.any():
            error = np.where(flushed, np.minimum(error, to_numpy(row_norm(pair.got))), error)
        bound = rows.bounds.out.ravel()[at]
        part_rounding = np.zeros_like(bound)
        if self.view.rounded_parts and rows.part_rounding is not None:
            part_rounding = rows.part_rounding.ravel()[at]
            bound = bound + part_rounding
        difference, expected = pair.error, pair.expected
        if self.exact:
            expected = self._exactly_due(pair, rows, at)
            difference = ulp_distance(pair.stored, expected)
            if pair.counted is not None:
                difference = torch.where(pair.counted, difference, 0)
            error, bound = to_numpy(difference.amax(dim=1)).astype(np.float64), np.zeros(len(at))
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(compared & (error > 0.0), error / bound, 0.0)
        measured = _OutRows(
            at=at, share=share, error=error, bound=bound, difference=difference, expected=expected
        )
        self._keep_worst_row(measured, pair.got, rows)
        if not self.exact and compared.any():
            torch_error = rows.torch_error.ravel()[at]
            length = rows.out_norm.ravel()[at]
            self._out_rows += int(np.count_nonzero(compared))
            self._error += float(np.sum(error[compared] ** 2))
            self._torch_error += float(np.sum(torch_error[compared] ** 2))
            self._expected += float(np.sum(length[compared] ** 2))
            self._part_rounding += float(np.sum(part_rounding[compared] ** 2))
        return share

    def _exactly_due(
        self, pair: Pair, rows: Rows, at: np.ndarray
    ) -> BFloat16[torch.Tensor, "m 512"]:
        """What data=exact asks for: the oracle rounded to bfloat16; where a right value may differ
        from it by some slack before it is rounded, the value of these that is nearest to the
        candidate's.
        """
        if rows.slack is None or not self.view.merges_parts:
            return round_to_bfloat16(pair.expected)
        slack = rows.slack
        if self.view.rounded_parts and rows.part_slack:
            slack = slack + rows.part_slack[: self.view.rounded_parts][-1]
        slack = slack.flatten(0, 1)[torch.from_numpy(at).to(slack.device)]
        least = round_to_bfloat16(pair.expected - slack)
        most = round_to_bfloat16(pair.expected + slack)
        return torch.minimum(torch.maximum(pair.stored, least), most)

    def _keep_worst_row(self, out: _OutRows, got: torch.Tensor, rows: Rows) -> None:
        """Keeps the row with the largest share; got: the candidate's values of these rows."""
        row = int(out.share.argmax())
        if out.share[row] <= self.shares["out"]:
            return
        column = int(out.difference[row].argmax())
        token, head = divmod(int(out.at[row]), self.view.heads)
        self.shares["out"] = float(out.share[row])
        self.worst["out"] = Worst(
            tensor="out",
            index=(int(rows.tokens[token]), head, column),
            got=float(got[row, column]),
            expected=float(out.expected[row, column]),
            share=float(out.share[row]),
        )
        if self.exact:
            self._allowed["out"] = (
                f"the row is up to {int(out.error[row])} bfloat16 ulp off, allowed is none (exact "
                "data)"
            )
            return
        torch_error = float(rows.torch_error[token, head])
        rounded = "P, scores and parts" if self.view.rounded_parts else "P and scores"
        self._allowed["out"] = (
            f"the row's error is {out.error[row]:.3g}, allowed is {out.bound[row]:.3g} "
            f"(2 x torch's {torch_error:.3g}, and the rounding of {rounded})"
        )

    @property
    def tensor_share(self) -> float:
        """The relative L2 error of out as a share of its bound; 0 under FEW_ROWS rows."""
        if self.exact or self._out_rows < FEW_ROWS or self._error == 0.0:
            return 0.0
        if self._expected == 0.0:
            return math.inf
        return self._rel_l2 / self._rel_l2_bound

    @property
    def _rel_l2(self) -> float:
        return math.sqrt(self._error / self._expected)

    @property
    def _rel_l2_bound(self) -> float:
        floor = OUT_FLOOR * math.sqrt(self._out_rows / self._expected)
        parts = math.sqrt(self._part_rounding / self._expected)
        return tensor_bound(math.sqrt(self._torch_error / self._expected)) + floor + parts

    @property
    def calibrated_failures(self) -> dict[str, str]:
        """A sentence for each tensor outside the calibrated bounds."""
        failures = {}
        for name in ("out", "max_logits", "lse"):
            if self.shares.get(name, 0.0) > 1.0:
                worst = self.worst[name]
                place = ", ".join(map(str, worst.index))
                failures[name] = (
                    f"{name}[{place}] is {worst.got:.7g}, expected {worst.expected:.7g}; "
                    f"{self._allowed[name]}"
                )
        if self.tensor_share > 1.0 and "out" not in failures:
            failures["out"] = (
                f"out as a whole has the relative L2 error {self._rel_l2:.3g}, allowed is "
                f"{self._rel_l2_bound:.3g} (2 x torch + 2^{round(math.log2(TENSOR_ROUNDING))})"
            )
        return failures

    @property
    def flashmla_failures(self) -> dict[str, str]:
        """A sentence for each tensor outside FlashMLA's own tolerances."""
        return flashmla_failures(self.distances, "the oracle", self.contract.whose)

    @property
    def metrics(self) -> dict[str, TensorMetrics]:
        return {name: distance.metrics() for name, distance in self.distances.items()}

    def suspects(self, most: int) -> list[int]:
        """The tokens with the largest shares, largest first."""
        if not self._tokens:
            return []
        tokens, shares = np.concatenate(self._tokens), np.concatenate(self._token_shares)
        return [int(tokens[i]) for i in np.argsort(-shares, kind="stable")[:most]]


def flashmla_failures(
    distances: dict[str, Distance], other: str, whose: str = PREFILL.whose
) -> dict[str, str]:
    """The upstream tests' rule on collected distances: each element's, and the cosine."""
    failures = {}
    for name, distance in distances.items():
        rule = distance.tolerance
        if distance.worst_use >= 1.0 and distance.worst_at is not None:
            got, expected = distance.worst_values
            place = ", ".join(map(str, distance.worst_at))
            failures[name] = (
                f"{name}[{place}] is {got:.7g}, {other} has {expected:.7g}; {whose} allow "
                f"{rule} ({distance.elements - distance.matching} elements outside)"
            )
        elif abs(distance.cosine_difference) > rule.cosine:
            failures[name] = (
                f"the cosine difference of {name} to {other} is {distance.cosine_difference:.3g}; "
                f"{whose} allow {rule.cosine:g}"
            )
    return failures
