"""In which order cases are begun. Rows stand in a report in the order of the cases, whatever it is.

Cases of one shape stay together, since a kernel is compiled once for each shape in each process.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from compare.cases.case import Case
from compare.cases.sparse_prefill import SparsePrefillCase
from compare.run.jax_implementations import HEADS, KEYS
from compare.run.session import Task

_SHAPE_ELEMENTS = 4_000_000
"""What a shape costs besides its tensors (compilation, mostly), in elements of that time."""

_COMPILED, _KNOWN = 80, 10
"""What the interpreter spends on a case besides its blocks, in blocks: of a new shape and of one
that it has compiled (measured: 2 s, 0.3 s and 0.02 to 0.04 s a block)."""


def shape(case: Case) -> tuple[object, ...]:
    """What a kernel is compiled for: jax_impl.sparse_prefill pads heads and widths outside of the
    program, to which a sink and lengths always belong."""
    if not isinstance(case, SparsePrefillCase):
        return (case.suite,)
    tokens = tuple(sorted(set(case.q_lens) - {0})) or case.tokens  # each chunk is a call
    heads, width = -(-case.h // HEADS), -(-case.topk // (2 * KEYS))
    return (case.suite, tokens, case.s_kv, heads, case.d, width)


def by_shape(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks of each shape, the shapes in the order of their first tasks."""
    shapes: dict[tuple[object, ...], list[Task]] = {}
    for task in tasks:
        shapes.setdefault(shape(task.case), []).append(task)
    return list(shapes.values())


def longest_first(groups: Sequence[list[Task]]) -> list[list[Task]]:
    """Those that take longest first: begun last, they would run on when all else is done."""
    return sorted(groups, key=_cost, reverse=True)


def _cost(group: Sequence[Task]) -> int:
    """Tensors are made, moved and judged element by element; the oracle's arithmetic, which has a
    limit, takes less than that."""
    cases = [task.case for task in group if isinstance(task.case, SparsePrefillCase)]
    return _SHAPE_ELEMENTS + sum(case.tokens * case.h * (case.d + 512) for case in cases)


def variety_first(tasks: Sequence[Task], interpreted: Callable[[Case], bool]) -> list[Task]:
    """The order that lets a limited time of the interpreter cover most: what it runs first, and of
    that always the case that shows most of what was seldom shown, for its time. `interpreted`: does
    it run this case? The others follow in their own order."""
    left = [t for t in tasks if isinstance(t.case, SparsePrefillCase) and interpreted(t.case)]
    others = [task for task in tasks if task not in left]
    shown: collections.Counter[tuple[str, object]] = collections.Counter()
    compiled: set[tuple[object, ...]] = set()
    ordered: list[Task] = []

    def worth(task: Task) -> float:
        case = task.case
        assert isinstance(case, SparsePrefillCase)
        new = sum(1 / (1 + shown[feature]) for feature in _features(case))
        calls = len(set(case.q_lens) - {0}) or 1
        fixed = _KNOWN if shape(case) in compiled else _COMPILED * calls
        return new / (fixed + case.blocks(KEYS, HEADS))

    while left:
        best = max(left, key=worth)  # the first of equals
        left.remove(best)
        ordered.append(best)
        assert isinstance(best.case, SparsePrefillCase)
        shown.update(_features(best.case))
        compiled.add(shape(best.case))
    return ordered + others


def _features(case: SparsePrefillCase) -> list[tuple[str, object]]:
    """What a case has that another may not have."""
    return [
        ("size", (case.h, case.d)),
        ("topk", case.topk),
        ("data", case.data),
        ("sink", case.sink),
        ("length", case.length),
        ("holes", case.invalid > 0),
        ("order", case.order),
        ("empty rows", case.empty_rows > 0),
        ("strided", case.strided),
        ("chunks", case.plan),
    ]
