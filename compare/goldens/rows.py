"""Recorded results of attention: all statistics, and some of the (token, head) rows of `out`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt64

from compare.goldens.format import array_sha256
from compare.protocol.inputs import Inputs, Result
from compare.protocol.records import Incomplete, Records, Stored

_WIDTH = 512
_ROW_BYTES = _WIDTH * 2
_STREAM = 0x726F7773  # a Philox key of its own, apart from the inputs' streams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What a case may take before compression. most, fewest: rows of `out`. bytes: of the case,
    what the statistics of every row leave of which is for `out`. statistics: bytes of a row's.
    """

    most: int
    fewest: int
    bytes: int
    statistics: int

    def rows(self, total: int) -> int:
        """How many of `total` (token, head) rows are kept."""
        room = (self.bytes - total * self.statistics) // _ROW_BYTES
        return min(total, max(self.fewest, min(self.most, room)))


class RowRecords(Records):
    """Base of the suites whose results have `out` and statistics of every row.

    share: of a case. statistics: the result's fields that are kept whole, optional: those of them
    that may be None. facts: its other fields that are kept, in the manifest. result_type: what is
    made of them again.
    """

    share: ClassVar[Share]
    statistics: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    facts: ClassVar[tuple[str, ...]] = ()
    result_type: ClassVar[type[Result]]

    def kinds(
        self, inputs: Any, lse: Float32[np.ndarray, "T H"]
    ) -> dict[str, Bool[np.ndarray, "T H"]]:
        """Where special values are at stake, by kind; a kind may have no row."""
        raise NotImplementedError

    def special_rows(
        self, inputs: Any, lse: Float32[np.ndarray, "T H"]
    ) -> dict[str, Bool[np.ndarray, "T H"]]:
        """The rows where special values are at stake, by kind; a row may be of several kinds."""
        return {kind: rows for kind, rows in self.kinds(inputs, lse).items() if rows.any()}

    def choose_rows(
        self, inputs: Any, lse: Float32[np.ndarray, "T H"], seed: int, budget: int | None = None
    ) -> tuple[Int32[np.ndarray, " R"], int]:
        """The rows of `out` that are kept, ascending (token * H + head), and how many of them are
        special.

        Every special row is kept, and ordinary rows by the seed fill up to `budget` (None: the
        share's). Where there are more special rows than that, each kind in turn, the ordinary rows
        being one, gives its next row by the seed. Integer arithmetic only: the same rows on every
        machine.
        """
        total = lse.size
        budget = min(total, self.share.rows(total) if budget is None else budget)
        order = np.argsort(_philox(seed, total), kind="stable")
        kinds = [rows.reshape(-1) for rows in self.special_rows(inputs, lse).values()]
        special = np.logical_or.reduce(kinds) if kinds else np.zeros(total, bool)
        if special.sum() <= budget:
            chosen = np.concatenate([order[special[order]], order[~special[order]]])[:budget]
        else:
            queues = [list(order[of[order]]) for of in [*kinds, ~special]]
            chosen = np.fromiter(_in_turn(queues, budget), np.int64, budget)
        chosen = np.sort(chosen)
        return chosen.astype(np.int32), int(special[chosen].sum())

    def keep(self, inputs: Inputs, result: Any) -> Stored:
        kept = {name: getattr(result, name) for name in self.statistics}
        absent = [n for n, array in kept.items() if array is None and n not in self.optional]
        if absent or result.out_rows is not None:
            raise Incomplete(f"a recording needs {' and '.join((*absent, ''))}the whole of out")
        total = result.lse.size
        rows, special = self.choose_rows(inputs, result.lse, getattr(inputs.case, "seed", 0))
        return Stored(
            tensors={
                **{name: np.asarray(array) for name, array in kept.items() if array is not None},
                "out": result.out.reshape(total, _WIDTH)[rows],
                "out_rows": rows,
            },
            facts={
                "out_sha256": array_sha256(result.out),
                "rows": {"kept": len(rows), "special": special, "of": total},
                **{name: getattr(result, name) for name in self.facts},
            },
        )

    def restore(self, inputs: Inputs, stored: Stored, notes: tuple[str, ...]) -> Result:
        held, optional = stored.tensors.keys(), set(self.optional)
        needed = {*self.statistics, "out", "out_rows"}
        if not needed - optional <= held <= needed or not stored.facts.keys() >= {*self.facts}:
            raise Incomplete(f"a result has {', '.join(sorted(needed))}")
        facts = {name: stored.facts[name] for name in self.facts}
        return self.result_type(**stored.tensors, **facts, notes=notes)  # type: ignore[arg-type]


def sink_rows(
    sink: Float32[np.ndarray, " H"] | None, shape: tuple[int, ...]
) -> dict[str, Bool[np.ndarray, "T H"]]:
    """The rows of the heads whose sink is -inf, +inf, NaN, the smallest or the largest finite
    one.
    """
    if sink is None:
        return {}
    heads = {"sink -inf": sink == -np.inf, "sink +inf": sink == np.inf}
    heads["sink NaN"] = np.isnan(sink)
    finite = np.flatnonzero(np.isfinite(sink))
    if len(finite):
        order = finite[np.argsort(sink[finite], kind="stable")]
        heads["sink smallest"] = np.arange(len(sink)) == order[0]
        heads["sink largest"] = np.arange(len(sink)) == order[-1]
    return {kind: np.broadcast_to(of, shape) for kind, of in heads.items()}


def _in_turn(queues: list[list[int]], count: int):
    """The first `count` distinct elements, one from each queue in turn."""
    taken: set[int] = set()
    positions = [0] * len(queues)
    while True:
        for k, queue in enumerate(queues):
            while positions[k] < len(queue) and queue[positions[k]] in taken:
                positions[k] += 1
            if positions[k] < len(queue):
                taken.add(queue[positions[k]])
                yield queue[positions[k]]
                if len(taken) == count:
                    return


def _philox(seed: int, count: int) -> UInt64[np.ndarray, " count"]:
    return np.random.Philox(key=np.array([seed, _STREAM], np.uint64)).random_raw(count)
