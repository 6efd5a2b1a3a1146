"""Special values come first and exactly: NaN, infinities and exact zeros at their places, in all
rows of a result, whatever the tolerance.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from compare.judging.contract import PREFILL, Contract
from compare.judging.result_view import OutBlock, ResultView
from compare.judging.row_kinds import RowKinds
from compare.protocol.verdict import Worst

SUSPECTS = 64

_INFINITY = 0x7F80
"""The bits of +inf in bfloat16."""


@dataclasses.dataclass(kw_only=True)
class Finding:
    """All violations of one rule in one tensor: how often, and the first place with its value.

    expected: the value that is due; None where any finite one is.
    """

    tensor: str
    rule: str
    expected: float | None
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

    def __init__(self, contract: Contract = PREFILL) -> None:
        self._contract = contract
        self._findings: dict[tuple[str, str], Finding] = {}
        self.other_inf_at_empty = 0
        """How many rows without a key have the lse of the other convention."""
        self.zero_lse_at_empty = 0
        self.nan_where_finite = 0
        """How many lses are NaN where a finite one is due."""
        self.suspects: list[int] = []
        """Tokens with a violation, the first 64."""

    @property
    def findings(self) -> list[Finding]:
        return list(self._findings.values())

    def add(
        self, tokens: Int64[np.ndarray, " n"], kinds: RowKinds, view: ResultView, out: OutBlock
    ) -> None:
        """One block of tokens; out: its rows as `view.block` gives them."""
        statistics = view.statistics(tokens)
        self._statistic(tokens, kinds, "lse", statistics["lse"])
        if "max_logits" in statistics:
            self._statistic(tokens, kinds, "max_logits", statistics["max_logits"])
        if len(out.at) == 0:
            return
        largest = out.magnitudes.amax(dim=1).cpu().numpy()
        if kinds.ordinary and (largest < _INFINITY).all():
            return
        smallest = out.magnitudes.amin(dim=1).cpu().numpy()
        nan_out, zero_out, undefined = (
            mask.ravel()[out.at] for mask in (kinds.nan_out, kinds.zero_out, kinds.undefined)
        )
        empty = np.repeat(kinds.empty, view.heads)[out.at]
        finite = ~(nan_out | zero_out | undefined)
        contract = self._contract
        for wrong, rule, expected in (
            (nan_out & (smallest <= _INFINITY), f"NaN is due: {contract.nan_key}", math.nan),
            (zero_out & empty & (largest != 0), f"0 is due: {contract.no_key}", 0.0),
            (zero_out & ~empty & (largest != 0), "0 is due: the sink is +inf", 0.0),
            (finite & (largest >= _INFINITY), "a finite value is due", None),
        ):
            if wrong.any():
                self._note_rows(tokens, view.heads, out, np.flatnonzero(wrong), rule, expected)

    def _note_rows(
        self,
        tokens: Int64[np.ndarray, " n"],
        heads: int,
        out: OutBlock,
        rows: Int64[np.ndarray, " m"],
        rule: str,
        expected: float | None,
    ) -> None:
        """Rows of out, at least one, that break a rule; expected as in Finding."""
        broken = _breaks(out.magnitudes[torch.from_numpy(rows).to(out.values.device)], expected)
        column = int(broken[0].int().argmax())
        token, head = divmod(out.at[rows], heads)
        first = Worst(
            tensor="out",
            index=(int(tokens[token[0]]), int(head[0]), column),
            got=float(out.values[int(rows[0]), column]),
            expected=expected,
            share=math.inf,
        )
        count = int(torch.count_nonzero(broken))
        finding = Finding(tensor="out", rule=rule, expected=expected, count=count, first=first)
        self._note(finding, tokens[token])

    def merge(self, later: SpecialValues) -> None:
        """Takes in what was found in blocks that come after its own."""
        for finding in later._findings.values():
            self._note(finding, np.zeros(0, np.int64))
        self.other_inf_at_empty += later.other_inf_at_empty
        self.zero_lse_at_empty += later.zero_lse_at_empty
        self.nan_where_finite += later.nan_where_finite
        self._suspect(later.suspects)

    def _suspect(self, tokens: list[int]) -> None:
        room = SUSPECTS - len(self.suspects)
        self.suspects += [token for token in tokens if token not in self.suspects][:room]

    def _statistic(self, tokens: np.ndarray, kinds: RowKinds, tensor: str, got: np.ndarray) -> None:
        value = self._contract.empty_lse if tensor == "lse" else -math.inf
        empty = np.broadcast_to(kinds.empty[:, None], got.shape)
        nan = kinds.nan_score
        finite = ~(empty | nan | kinds.undefined)

        def note(rows: np.ndarray, rule: str, expected: float | None, broken: np.ndarray) -> None:
            wrong = rows & broken
            if not wrong.any():
                return
            places = np.argwhere(wrong)
            row, head = map(int, places[0])
            first = Worst(
                tensor=tensor,
                index=(int(tokens[row]), head),
                got=float(got[row, head]),
                expected=expected,
                share=math.inf,
            )
            finding = Finding(
                tensor=tensor, rule=rule, expected=expected, count=len(places), first=first
            )
            self._note(finding, tokens[places[:, 0]])

        sign = "+inf" if value > 0 else "-inf"
        note(empty, f"{sign} is due: {self._contract.no_key}", value, got != value)
        note(finite, "a finite value is due", None, ~np.isfinite(got))
        if tensor == "lse":
            note(nan, "NaN is due: a NaN in q or in a referenced key", math.nan, ~np.isnan(got))
            self.other_inf_at_empty += int(np.count_nonzero(empty & (got == -value)))
            self.zero_lse_at_empty += int(np.count_nonzero(empty & (got == 0.0)))
            self.nan_where_finite += int(np.count_nonzero(finite & np.isnan(got)))

    def _note(self, found: Finding, tokens: Int64[np.ndarray, " m"]) -> None:
        """One more block's violations of a rule; tokens: where, ascending."""
        mine = self._findings.setdefault((found.tensor, found.rule), found)
        if mine is not found:
            mine.count += found.count
        self._suspect(np.unique(tokens)[:SUSPECTS].tolist())


def _breaks(bits: Shaped[Tensor, "m 512"], expected: float | None) -> Bool[Tensor, "m 512"]:
    """Which elements, by their bits without the sign, aren't what is expected, NaN, 0 or finite."""
    if expected is None:
        return bits >= _INFINITY
    return bits <= _INFINITY if math.isnan(expected) else bits != 0
