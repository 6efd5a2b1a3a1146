"""In which order cases are begun. Rows stand in a report in the order of the cases, whatever it is.

Cases of one shape stay together, since a kernel is compiled once for each shape in each process.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from compare.houses.jax_backend import HEADS, KEYS
from compare.protocol.case import Case
from compare.run.session import Task
from compare.suites.dcp_decode import jax_adapter as jax_decode
from compare.suites.dcp_decode.case import KEY_WIDTH, VALUE_WIDTH, DcpDecodeCase
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.v4_prefill.case import WIDTH, V4PrefillCase
from compare.suites.v4_stages.case import V4StagesCase

_SHAPE_ELEMENTS = 4_000_000
"""What a shape costs besides its tensors (compilation, mostly), in elements of that time."""

_ALONE_ELEMENTS = 2**31
"""4 GB of bfloat16 in q and out."""

_COMPILED, _KNOWN = 80, 10
"""What the interpreter spends on a case besides its blocks, in blocks: of a new shape and of one
that it has compiled (measured: 2 s, 0.3 s and 0.02 to 0.04 s a block)."""
_DECODE_PAIR = 3
"""A pair of blocks of the decode kernel, in blocks of sparse prefill."""

_GATHERED = 64
"""Tokens gathered, in one block of sparse prefill."""
_V4_PROGRAMS = 2
"""A chunk's gathers and its attention, in programs of sparse prefill."""

_Interpreted = SparsePrefillCase | DcpDecodeCase | V4PrefillCase | V4StagesCase


def shape(case: Case) -> tuple[object, ...]:
    """What a kernel is compiled for: jax_impl.sparse_prefill pads heads and widths outside of the
    program, to which a sink and lengths always belong; a plan of decode has the size of its batch.
    """
    if isinstance(case, DcpDecodeCase):
        rows = (case.lens, case.q, case.h, case.causal)
        group = (case.world, case.rank, case.interleave)
        return (case.suite, *rows, case.page, case.kv, case.q_dtype, *group)
    if isinstance(case, V4PrefillCase):
        return (case.suite, *_batch(case), case.h, case.plan)
    if isinstance(case, V4StagesCase):
        return (case.suite, case.stage, case.record, case.offset, *_batch(case.batch()))
    if not isinstance(case, SparsePrefillCase):
        return (case.suite,)
    tokens = tuple(sorted(set(case.q_lens) - {0})) or case.tokens  # each chunk is a call
    heads, width = -(-case.h // HEADS), -(-case.topk // (2 * KEYS))
    return (case.suite, tokens, case.s_kv, heads, case.d, width)


def _batch(case: V4PrefillCase) -> tuple[object, ...]:
    """What of a V4 batch its chunks, its pages and its lists are made for."""
    chunks = (case.max_len, case.max_tokens, case.chunk, case.bound)
    lists = (case.ratio, case.topk, case.window, case.images, case.max_image)
    return (case.seq, case.q, *lists, case.page, case.format, *chunks)


def by_shape(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks of each shape, the shapes in the order of their first tasks."""
    shapes: dict[tuple[object, ...], list[Task]] = {}
    for task in tasks:
        shapes.setdefault(shape(task.case), []).append(task)
    return list(shapes.values())


def longest_first(groups: Sequence[list[Task]]) -> list[list[Task]]:
    """Those that take longest first: begun last, they would run on when all else is done."""
    return sorted(groups, key=_cost, reverse=True)


def alone(case: Case) -> bool:
    """Whether a case's tensors are too many for any other to run beside it: candidate, reference
    and judge hold them on one device, and the inputs and two results stand in the host's memory."""
    return _elements(case) > _ALONE_ELEMENTS


def _cost(group: Sequence[Task]) -> int:
    """Tensors are made, moved and judged element by element; the oracle's arithmetic, which has a
    limit, takes less than that."""
    return _SHAPE_ELEMENTS + sum(_elements(task.case) for task in group)


def _elements(case: Case) -> int:
    if isinstance(case, SparsePrefillCase):
        return case.tokens * case.h * (case.d + 512)
    if isinstance(case, DcpDecodeCase):
        rows = case.tokens * case.h * (KEY_WIDTH + VALUE_WIDTH)
        return len(case.ranks) * (rows + sum(case.lens) * KEY_WIDTH)
    if isinstance(case, V4PrefillCase):
        return case.tokens * case.h * 2 * WIDTH + _gathered(case) * WIDTH
    return 0


def _gathered(case: V4PrefillCase) -> int:
    """Tokens that are taken from both caches."""
    return sum(case.compressed(i) + case.gathered(i) for i in range(len(case.seq)))


def variety_first(tasks: Sequence[Task], interpreted: Callable[[Case], bool]) -> list[Task]:
    """The order that lets a limited time of the interpreter cover most: what it runs first, and of
    that always the case that shows most of what was seldom shown, for its time. `interpreted`: does
    it run this case? The others follow in their own order."""
    left = [t for t in tasks if isinstance(t.case, _Interpreted) and interpreted(t.case)]
    others = [task for task in tasks if task not in left]
    shown: collections.Counter[tuple[str, object]] = collections.Counter()
    compiled: set[tuple[object, ...]] = set()
    ordered: list[Task] = []

    def worth(task: Task) -> float:
        case = task.case
        assert isinstance(case, _Interpreted)
        new = sum(1 / (1 + shown[feature]) for feature in _features(case))
        calls, blocks = _work(case)
        fixed = _KNOWN if shape(case) in compiled else _COMPILED * calls
        return new / (fixed + blocks)

    while left:
        best = max(left, key=worth)  # the first of equals
        left.remove(best)
        ordered.append(best)
        assert isinstance(best.case, _Interpreted)
        shown.update(_features(best.case))
        compiled.add(shape(best.case))
    return ordered + others


def _work(case: _Interpreted) -> tuple[int, int]:
    """Programs of a case, and its blocks in those of sparse prefill."""
    if isinstance(case, V4StagesCase):
        return 1, -(-_gathered(case.batch()) // _GATHERED)
    if isinstance(case, V4PrefillCase):
        blocks = case.blocks(KEYS, HEADS) + -(-_gathered(case) // _GATHERED)
        return _V4_PROGRAMS, blocks
    if isinstance(case, DcpDecodeCase):
        pairs = case.blocks(jax_decode.KEYS, jax_decode.ROWS)
        return len(case.ranks), _DECODE_PAIR * pairs
    return len(set(case.q_lens) - {0}) or 1, case.blocks(KEYS, HEADS)


def _features(case: _Interpreted) -> list[tuple[str, object]]:
    """What a case has that another may not have."""
    if isinstance(case, V4StagesCase):
        return [
            ("suite", case.suite),
            ("stage", case.stage),
            ("recorded", case.recorded),
            ("cache", (case.ratio, case.page, case.format)),
        ]
    if isinstance(case, V4PrefillCase):
        return [
            ("suite", case.suite),
            ("ratio", case.ratio),
            ("v4 heads", -(-case.h // HEADS)),
            ("cache", (case.page, case.format)),
            ("requests", min(len(case.q), 3)),
            ("zero queries", 0 in case.q),
            ("images", bool(case.images)),
            ("v4 plan", (case.plan, case.chunk)),
            ("v4 data", case.data),
            ("sink", case.sink),
            ("bound", case.bound > 0),
            ("window", case.window),
        ]
    if isinstance(case, DcpDecodeCase):
        return [
            ("suite", case.suite),
            ("heads", case.h),
            ("page", case.page),
            ("ragged", len(set(case.q)) > 1),
            ("group", (case.world, case.rank == "all")),
            ("interleave", case.interleave),
            ("numbers", (case.kv, case.q_dtype)),
            ("decode data", case.data),
            ("padding", case.pad_rows > 0),
            ("stale", case.stale),
            ("missing", case.missing > 0),
            ("nan", case.nan),
            ("scale", (case.scale > 0) - (case.scale < 0)),
            ("draft", not case.causal),
            ("short", any(t < q for t, q in zip(case.lens, case.q, strict=True))),
        ]
    return [
        ("suite", case.suite),
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
