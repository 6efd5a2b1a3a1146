"""Known faults, by suite in a table with one entry for each: diagnosis tries them on a failing
candidate, and calibration plants them into the oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from compare.judging.evidence import Evidence
from compare.judging.result_view import ResultView
from compare.judging.rows import OracleRows
from compare.judging.special import SpecialValues


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """Tokens of a case on which faults are computed."""

    evidence: Evidence[Any]
    tokens: Int64[np.ndarray, " n"]
    _made: dict[Callable[[Sample], Any], Any] = dataclasses.field(default_factory=dict, repr=False)

    def once[Made](self, make: Callable[[Sample], Made]) -> Made:
        """make(self), computed for the first who asks."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    @property
    def contract(self) -> OracleRows:
        """What the contract says on these tokens."""
        return self.once(_contract)


def _contract(sample: Sample) -> OracleRows:
    blocks = [rows.oracle for rows in sample.evidence.blocks(sample.tokens)]
    return OracleRows(
        **{
            field.name: np.concatenate([getattr(rows, field.name) for rows in blocks])
            for field in dataclasses.fields(OracleRows)
        }
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A fault that is tried: its slug, a sentence, and the tensors on the sample if it were so.

    silent: of which of the sample's tokens it can't tell what they would be; known when rows has
    run. None: of none. by_value: what speaks for it are values; that a row is NaN as it has it, as
    it would be after whatever reads NaN, is not enough.
    """

    name: str
    sentence: str
    rows: Callable[[], OracleRows]
    silent: Callable[[], Bool[np.ndarray, " n"]] | None = None
    by_value: bool = False


def _always(_: Any) -> bool:
    return True


def _itself(inputs: Any) -> Iterable[Any]:
    return (inputs,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """An entry of a suite's table.

    name: the slug of its diagnosis; reports rely on it. which: tells entries of one name apart.
    sentence: what it does; {count} is how many rows show it, of a fault with `count`.
    variant: torch_ref's, with which the oracle computes it; or rows(value, sample): its tensors.
    possible: whether such inputs can have it; whether their values show it is another question.
    each: the values of what sentence, variant and rows depend on: where these are functions, they
    are called with one; the inputs themselves unless it says otherwise.
    stage: the first stage that it makes wrong, of suites whose results show stages.
    search, count: how diagnosis finds it where it isn't tried as it stands: by hypotheses about the
    candidate's own tensors, or by the special values of its rows.
    """

    name: str
    sentence: str | Callable[[Any], str]
    which: str = ""
    variant: Any = None
    rows: Callable[..., OracleRows] | None = None
    possible: Callable[[Any], bool] = _always
    each: Callable[[Any], Iterable[Any]] = _itself
    stage: str = "attention"
    search: Callable[[Sample, ResultView], Iterable[Hypothesis]] | None = None
    count: Callable[[SpecialValues], int] | None = None

    @property
    def label(self) -> str:
        """The name, and which of its entries this is."""
        return f"{self.name} ({self.which})" if self.which else self.name

    @property
    def words(self) -> str:
        """The sentence; of a fault that doesn't depend on the inputs any more."""
        assert isinstance(self.sentence, str)
        return self.sentence

    def of(self, inputs: Any) -> Iterator[Fault]:
        """The fault as these inputs can have it: with the very sentence, variant and rows."""
        if not self.possible(inputs):
            return
        for value in self.each(inputs):
            yield dataclasses.replace(
                self,
                sentence=self.sentence(value) if callable(self.sentence) else self.sentence,
                variant=self.variant(value) if callable(self.variant) else self.variant,
                rows=None if self.rows is None else partial(self.rows, value),
            )

    def tensors(self, sample: Sample) -> OracleRows:
        """The oracle's tensors with this fault; of one that `of` gave."""
        if self.rows is not None:
            return self.rows(sample)
        return sample.evidence.oracle(sample.tokens, self.variant)


def possible_faults(table: Iterable[Fault], inputs: Any) -> Iterator[Fault]:
    """The faults of a table as these inputs can have them."""
    for fault in table:
        yield from fault.of(inputs)


def hypotheses(
    table: Iterable[Fault], sample: Sample, view: ResultView, inputs: Any
) -> Iterator[Hypothesis]:
    """What to try on a candidate: all faults of a table that are possible with these inputs."""
    for entry in table:
        if entry.search is not None:
            yield from entry.search(sample, view)
        elif entry.count is None:
            for fault in entry.of(inputs):
                yield Hypothesis(
                    name=fault.name,
                    sentence=fault.words,
                    rows=partial(fault.tensors, sample),
                )
