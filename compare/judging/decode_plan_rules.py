"""The rules of a decode plan, as arithmetic on its rows; docs/planning-rules.md.

Written from the rules and not from a planner. Of a batch whose request i owns the rows
[qsl[i], qsl[i + 1]) and has T_i keys on all ranks together:

    bound(t) = T_i - (qsl[i + 1] - 1 - t)    causal: all keys but the request's tokens after t
             = T_i                           otherwise
    count(t) = how many global positions below bound(t) this rank owns
    rows at and past qsl[-1] are padding: they see nothing
    uniform  = every request that has tokens, and every one before it, owns [i m, (i + 1) m)

with m the promised most query tokens. Bounds are expanded in global positions first and brought to
a rank afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from compare.generate.ownership import local_length
from compare.judging.plans import DecodePlanInputs, DecodePlanResult

SHOWN = 8
"""Bounds of one group of rows that a sentence lists one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
    """A broken rule, the first and last row concerned (None: the batch), and a sentence."""

    rule: str
    rows: tuple[int, int] | None
    sentence: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RightPlan:
    """What a plan must say, one entry per row; request is None and bound 0 on padded rows."""

    ragged: bool
    request: tuple[int | None, ...]
    bound: tuple[int, ...]
    counts: tuple[int, ...]
    padding: tuple[bool, ...]


def right_plan(inputs: DecodePlanInputs) -> RightPlan:
    """The plan that the rules ask for."""
    starts, totals = inputs.query_start_loc, inputs.total_lens
    request: list[int | None] = []
    bound: list[int] = []
    for i, (start, end) in enumerate(pairwise(starts)):
        for t in range(start, end):
            request.append(i)
            bound.append(totals[i] - (end - 1 - t if inputs.causal else 0))
    tokens, rows = starts[-1], row_count(inputs)
    padding = rows - tokens
    return RightPlan(
        ragged=not _is_uniform(starts, inputs.max_query_len),
        request=(*request, *[None] * padding),
        bound=(*bound, *[0] * padding),
        counts=(*(count_of(inputs, b) for b in bound), *[0] * padding),
        padding=tuple(t >= tokens for t in range(rows)),
    )


def row_count(inputs: DecodePlanInputs) -> int:
    """Rows of the batch, padding included."""
    return inputs.query_start_loc[-1] if inputs.num_rows is None else inputs.num_rows


def count_of(inputs: DecodePlanInputs, bound: int) -> int:
    """The rank's keys below a global bound."""
    return local_length(bound, inputs.dcp_rank, inputs.dcp_world, inputs.interleave)


def _is_uniform(starts: Sequence[int], most: int) -> bool:
    requests = len(starts) - 1
    while requests and starts[requests] == starts[requests - 1]:
        requests -= 1  # requests without a token at the end are padding
    return all(starts[i] == i * most for i in range(requests + 1))


def divided_view(inputs: DecodePlanInputs) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Requests and bounds of the batch viewed as [requests, rows / requests]; None where the
    division doesn't come out. It is what vLLM 0.33.0 makes of a causal batch on several ranks.
    """
    rows, requests = row_count(inputs), len(inputs.total_lens)
    if requests == 0 or rows % requests:
        return None
    each = rows // requests
    request = tuple(t // each for t in range(rows))
    bound = tuple(inputs.total_lens[t // each] - (each - 1 - t % each) for t in range(rows))
    return request, bound


def violations(inputs: DecodePlanInputs, plan: DecodePlanResult) -> list[Violation]:
    """Every broken rule, in the order of the rows."""
    expected = right_plan(inputs)
    found = list(_form(plan, len(expected.bound)))
    if found:
        return found
    if plan.ragged != expected.ragged:
        found.append(_flag(inputs, expected))
    found += _padding(plan, expected)
    found += _rows(inputs, plan, expected)
    found += _counts(inputs, plan, expected)
    return found


def _form(plan: DecodePlanResult, rows: int) -> Iterator[Violation]:
    """One entry per row in everything."""
    for what in ("request", "bound", "local_counts", "padding"):
        given = len(getattr(plan, what))
        if given != rows:
            word = {"local_counts": "local counts", "padding": "padding flags"}.get(
                what, f"{what}s"
            )
            yield Violation(rule="rows", rows=None, sentence=f"{given} {word} for {rows} rows")


def _flag(inputs: DecodePlanInputs, expected: RightPlan) -> Violation:
    lens = "+".join(str(end - start) for start, end in pairwise(inputs.query_start_loc))
    m = inputs.max_query_len
    if not expected.ragged:
        sentence = f"the batch {lens} is called ragged; each request owns its {m} rows"
    else:
        sentence = (
            f"the batch {lens} is called uniform; as [requests, {m}] its rows would go to other "
            "requests, or to none"
        )
        requests, rows = len(inputs.total_lens), len(expected.bound)
        if rows == requests * m:
            sentence += f" ({rows} rows are {requests} x {m}, but counting isn't enough)"
    return Violation(rule="ragged", rows=None, sentence=sentence)


def _padding(plan: DecodePlanResult, expected: RightPlan) -> Iterator[Violation]:
    for rows, (called, is_padding) in _runs(
        len(expected.bound), lambda t: (bool(plan.padding[t]), expected.padding[t])
    ):
        if called != is_padding:
            what = "padding, called a request's" if is_padding else "a request's, called padding"
            yield Violation(rule="padding", rows=rows, sentence=f"{_named(rows)}: {what}")


class _RowKind(NamedTuple):
    """A row's request, the one that the plan gives it, and whether its bound is right."""

    request: int | None
    planned: int
    bounded: bool


def _rows(
    inputs: DecodePlanInputs, plan: DecodePlanResult, expected: RightPlan
) -> Iterator[Violation]:
    """Requests and bounds of real rows, those next to one another with one fault together."""
    real = inputs.query_start_loc[-1]

    def kind(t: int) -> _RowKind:
        return _RowKind(
            request=expected.request[t],
            planned=plan.request[t],
            bounded=plan.bound[t] == expected.bound[t],
        )

    for rows, row in _runs(real, kind):
        if row.planned == row.request and row.bounded:
            continue
        got, right = (_listed(b[rows[0] : rows[1] + 1]) for b in (plan.bound, expected.bound))
        if row.planned != row.request:
            sentence = (
                f"{_named(rows)} of request {row.request} use block table and length of request "
                f"{row.planned}, with {got}; due: request {row.request} with {right}"
            )
            yield Violation(rule="request", rows=rows, sentence=sentence)
        else:
            sentence = f"{_named(rows)} of request {row.request} have {got}; due: {right}"
            yield Violation(rule="bound", rows=rows, sentence=sentence)


def _counts(
    inputs: DecodePlanInputs, plan: DecodePlanResult, expected: RightPlan
) -> Iterator[Violation]:
    """Local counts that don't follow from the row's own bound, and padded rows that see keys."""

    def off(t: int) -> bool:
        if expected.padding[t]:
            return plan.local_counts[t] != 0
        return plan.local_counts[t] not in (count_of(inputs, plan.bound[t]), expected.counts[t])

    for rows, wrong in _runs(len(expected.bound), lambda t: (off(t), expected.padding[t])):
        if not wrong[0]:
            continue
        got, right = (
            _listed(c[rows[0] : rows[1] + 1], "key count")
            for c in (plan.local_counts, expected.counts)
        )
        if expected.padding[rows[0]]:
            sentence = f"{_named(rows)}, padding, have {got}; they see nothing"
        else:
            sentence = f"{_named(rows)} of rank {inputs.dcp_rank} have {got}; due: {right}"
        yield Violation(rule="local-count", rows=rows, sentence=sentence)


def _runs[Kind](rows: int, kind: Callable[[int], Kind]) -> Iterator[tuple[tuple[int, int], Kind]]:
    """(first, last) of neighbouring rows of one kind."""
    for found, group in groupby(range(rows), key=kind):
        members = list(group)
        yield (members[0], members[-1]), found


def _named(rows: tuple[int, int]) -> str:
    return f"row {rows[0]}" if rows[0] == rows[1] else f"rows {rows[0]} to {rows[1]}"


def _listed(values: Sequence[int], what: str = "bound") -> str:
    """bound 5; bounds 3, 4, 5; or the ends where there are many."""
    if len(set(values)) == 1:
        return f"{what} {values[0]}"
    if len(values) > SHOWN:
        return f"{what}s {values[0]} to {values[-1]}"
    return f"{what}s {', '.join(map(str, values))}"
