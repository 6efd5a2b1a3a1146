"""What a function of the user's own gives back, as a result: nothing is cast, shapes and dtypes are
the judge's to look at."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from compare.generate.ownership import local_length
from compare.judging.attention_call import SparsePrefillResult
from compare.judging.plans import DecodePlanInputs, DecodePlanResult, PlanChunk, PlanResult
from compare.protocol import arrays as convert
from compare.suites.dcp_decode.call import DcpDecodeResult
from compare.suites.v4_prefill.call import V4PrefillResult
from compare.suites.v4_prefill.implementation import chunk_stages
from compare.suites.v4_stages.call import V4StagesResult
from compare.suites.v4_stages.case import STAGES

_CHUNK = ("start", "end", "compressed_rows", "workspace_rows", "query_start", "query_end")
_STAGE = ("workspace", "indices", "lengths")
_ROWS = ("ragged", "request", "bound", "padding")


def sparse_prefill_result(answer: Any, name: str) -> SparsePrefillResult:
    """(out, max_logits, lse), a mapping or an object with these names, as a result; TypeError for
    anything else."""
    if isinstance(answer, SparsePrefillResult):
        return answer
    found = _named(answer, name, ("out", "max_logits", "lse"), ("out", "lse"))
    return SparsePrefillResult(
        out=convert.to_numpy(found["out"], "out"),
        lse=convert.to_numpy(found["lse"], "lse"),
        max_logits=None
        if found["max_logits"] is None
        else convert.to_numpy(found["max_logits"], "max_logits"),
    )


def v4_prefill_result(answer: Any, name: str) -> V4PrefillResult:
    """(out, max_logits, lse), a mapping or an object with these names, as a result; TypeError for
    anything else.

    A mapping or an object may have plan too, a sequence of chunks, and stages, one for each chunk,
    as objects with workspace, indices and lengths or mappings of these; None and what isn't there
    aren't compared.
    """
    if isinstance(answer, V4PrefillResult):
        return answer
    whole = sparse_prefill_result(answer, name)
    plan, stages = (_more(answer, field) for field in ("plan", "stages"))
    return V4PrefillResult(
        out=whole.out,
        lse=whole.lse,
        max_logits=whole.max_logits,
        plan=None if plan is None else plan_result(plan, name).chunks,
        stages=None
        if stages is None
        else chunk_stages(_stage(stage, number, name) for number, stage in enumerate(stages)),
    )


def _stage(stage: Any, number: int, name: str) -> Any:
    """An object with the three attributes, or a mapping of them, as an object."""
    if isinstance(stage, Mapping) and all(field in stage for field in _STAGE):
        return SimpleNamespace(**{field: stage[field] for field in _STAGE})
    if all(hasattr(stage, field) for field in _STAGE):
        return stage
    raise TypeError(
        f"{name} returned a {type(stage).__name__} as stage {number}; accepted: an object with "
        f"{', '.join(_STAGE)}, or a mapping of these"
    )


def v4_stages_result(answer: Any, name: str, stage: str) -> V4StagesResult:
    """What a stage gives back, in its order or by its names, or the array alone where there is
    one, as a result; TypeError for anything else."""
    if isinstance(answer, V4StagesResult):
        return answer
    fields = STAGES[stage]
    if len(fields) == 1 and hasattr(answer, "shape"):
        answer = (answer,)
    found = _named(answer, name, fields, fields)
    return V4StagesResult(arrays={field: convert.to_numpy(found[field], field) for field in fields})


def dcp_decode_result(answer: Any, name: str) -> DcpDecodeResult:
    """(out, lse), a mapping or an object with these names, as a result; TypeError for anything
    else."""
    if isinstance(answer, DcpDecodeResult):
        return answer
    found = _named(answer, name, ("out", "lse"), ("out", "lse"))
    return DcpDecodeResult(
        out=convert.to_numpy(found["out"], "out"), lse=convert.to_numpy(found["lse"], "lse")
    )


def plan_result(chunks: Any, name: str) -> PlanResult:
    """A sequence of chunks, as objects with the six attributes or tuples of them, as a plan."""
    if isinstance(chunks, PlanResult):
        return chunks
    rows = []
    for number, chunk in enumerate(chunks):
        if all(hasattr(chunk, field) for field in _CHUNK):
            words = [getattr(chunk, field) for field in _CHUNK]
        elif isinstance(chunk, (tuple, list)) and len(chunk) == len(_CHUNK):
            words = list(chunk)
        else:
            raise TypeError(
                f"{name} returned a {type(chunk).__name__} as chunk {number}; accepted: an object "
                f"with {', '.join(_CHUNK)}, or a tuple of these"
            )
        whole = _whole(words, f"chunk {number} of {name}")
        rows.append(PlanChunk(**dict(zip(_CHUNK, whole, strict=True))))
    return PlanResult(chunks=tuple(rows))


def decode_plan_result(answer: Any, name: str, inputs: DecodePlanInputs) -> DecodePlanResult:
    """(ragged, request, bound, padding), a mapping or an object with these names, as a plan.

    padding: one flag for each row, or how many rows at the end are padding.

    A plan that has local_counts too (as a fifth element, or by that name) is judged by them; of
    another they follow from its bounds by the ownership rule, and a note says so. TypeError for
    anything else.
    """
    if isinstance(answer, DecodePlanResult):
        return answer
    names = _ROWS
    if isinstance(answer, (tuple, list)) and len(answer) == len(_ROWS) + 1:
        names = (*_ROWS, "local_counts")
    found = _named(answer, name, names, _ROWS)
    counts = found.get("local_counts")
    if counts is None and not isinstance(answer, (tuple, list, Mapping)):
        counts = getattr(answer, "local_counts", None)
    elif counts is None and isinstance(answer, Mapping):
        counts = answer.get("local_counts")
    bound = _whole(found["bound"], f"bound of {name}")
    padding = _padding(found["padding"], len(bound), name)
    notes = ()
    if counts is None:
        group = (inputs.dcp_rank, inputs.dcp_world, inputs.interleave)
        counts = [
            0 if padded else local_length(max(0, b), *group)
            for b, padded in zip(bound, padding, strict=True)
        ]
        notes = ("local key counts follow from its bounds; the planner gave none",)
    return DecodePlanResult(
        ragged=bool(found["ragged"]),
        request=_whole(found["request"], f"request of {name}"),
        bound=bound,
        local_counts=_whole(counts, f"local_counts of {name}"),
        padding=padding,
        notes=notes,
    )


def _padding(given: Any, rows: int, name: str) -> tuple[bool, ...]:
    """Padding as one flag for each row."""
    if hasattr(given, "__iter__") and getattr(given, "ndim", 1):
        return tuple(bool(flag) for flag in given)
    try:
        count = operator.index(given)
    except TypeError:
        count = -1
    if not 0 <= count <= rows or isinstance(given, bool):
        raise TypeError(
            f"padding of {name}: {given!r}; accepted: one flag for each row, or how many of the "
            f"{rows} rows, at the end, are padding"
        )
    return tuple(t >= rows - count for t in range(rows))


def _more(answer: Any, field: str) -> Any:
    """A field that an answer may have."""
    if isinstance(answer, Mapping):
        return answer.get(field)
    return getattr(answer, field, None)


def _named(
    answer: Any, name: str, fields: tuple[str, ...], needed: tuple[str, ...]
) -> dict[str, Any]:
    """The fields of an answer; `needed` must be attributes of an object."""
    if isinstance(answer, Mapping):
        return {field: answer.get(field) for field in fields}
    if all(hasattr(answer, field) for field in needed):
        return {field: getattr(answer, field, None) for field in fields}
    if isinstance(answer, (tuple, list)) and len(answer) == len(fields):
        return dict(zip(fields, answer, strict=True))
    size = f" of {len(answer)}" if isinstance(answer, (tuple, list)) else ""
    raise TypeError(
        f"{name} returned a {type(answer).__name__}{size}; accepted: ({', '.join(fields)}) or "
        "a mapping or an object with these names"
    )


def _whole(values: Iterable[Any], name: str) -> tuple[int, ...]:
    """`values` as they are; TypeError where one isn't a whole number, which int() would cut."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name}: {values!r}; accepted: whole numbers") from None
