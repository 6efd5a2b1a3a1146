"""What a planner of decode rows is called with and gives back."""

from __future__ import annotations

import operator
from typing import Any

from compare.generate.ownership import local_length
from compare.judging.plans import DecodePlanInputs, DecodePlanResult
from compare.protocol.signature import Signature
from compare.protocol.values import field_of, named_fields, whole_numbers

_ROWS = ("ragged", "request", "bound", "padding")
_COUNTS = "local_counts"


class DecodePlanSignature(Signature[DecodePlanInputs, DecodePlanResult]):
    """One batch, and its rows."""

    def read(self, answer: Any, name: str, inputs: DecodePlanInputs) -> DecodePlanResult:
        """(ragged, request, bound, padding), a mapping or an object with these names.

        padding: one flag for each row, or how many rows at the end are padding. A plan that has
        local_counts too (as a fifth element, or by that name) is judged by them; of another they
        follow from its bounds by the ownership rule, and a note says so.
        """
        fields = _ROWS
        if isinstance(answer, (tuple, list)) and len(answer) == len(_ROWS) + 1:
            fields = (*_ROWS, _COUNTS)
        rows = named_fields(answer, name, fields, _ROWS)
        counts = rows.get(_COUNTS)
        if counts is None and not isinstance(answer, (tuple, list)):
            counts = field_of(answer, _COUNTS)
        bound = whole_numbers(rows["bound"], f"bound of {name}")
        padding = padding_flags(rows["padding"], len(bound), name)
        notes = ()
        if counts is None:
            group = (inputs.dcp_rank, inputs.dcp_world, inputs.interleave)
            counts = [
                0 if padded else local_length(max(0, b), *group)
                for b, padded in zip(bound, padding, strict=True)
            ]
            notes = ("local key counts follow from its bounds; the planner gave none",)
        return DecodePlanResult(
            ragged=bool(rows["ragged"]),
            request=whole_numbers(rows["request"], f"request of {name}"),
            bound=bound,
            local_counts=whole_numbers(counts, f"local_counts of {name}"),
            padding=padding,
            notes=notes,
        )


def padding_flags(padding: Any, rows: int, name: str) -> tuple[bool, ...]:
    """Padding as one flag for each row: there are such, or how many rows at the end are padding."""
    if hasattr(padding, "__iter__") and getattr(padding, "ndim", 1):
        return tuple(bool(flag) for flag in padding)
    try:
        count = operator.index(padding)
    except TypeError:
        count = -1
    if not 0 <= count <= rows or isinstance(padding, bool):
        raise TypeError(
            f"padding of {name}: {padding!r}; accepted: one flag for each row, or how many of the "
            f"{rows} rows, at the end, are padding"
        )
    return tuple(t >= rows - count for t in range(rows))


SIGNATURE = DecodePlanSignature(
    inputs_type=DecodePlanInputs,
    result_type=DecodePlanResult,
    telling="max_query_len",
    optional={"dcp_rank": "", "dcp_world": "", "interleave": ""},
    takes_arrays=False,
)
