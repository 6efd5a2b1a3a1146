"""The stages of one V4 prefill by themselves: plan, gather, indices. Each is compared with what it
alone must give, so that a fault is seen where it is made.

Rows of a workspace that nothing is gathered to may hold anything; indices may come in any order.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Int64

from compare.judging.evidence import Evidence
from compare.judging.plans import PlanChunk
from compare.judging.result_view import FormFault
from compare.protocol.verdict import Diagnosis, Status, Worst
from compare.suites.v4_prefill.call import ChunkStage, V4PrefillResult
from compare.suites.v4_prefill.evidence import V4Witness
from compare.suites.v4_prefill.naming import name_of_gather, name_of_indices
from compare.suites.v4_prefill.plan import MEANINGS, NAMES, PRESCRIBED, plan_violations
from compare.suites.v4_prefill.rows import NOTHING

_PADDED = -2
"""Sorts before every key: what stands behind a list."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageFault:
    """What is wrong with a stage: its name (plan, gather, indices or attention), the fault's slug,
    a sentence that begins with the stage and says where and by how much, what the fault is, and
    the place to look at.
    """

    stage: str
    name: str
    sentence: str
    meaning: str
    worst: Worst | None = None

    @property
    def status(self) -> Status:
        return Status.PLAN if self.stage == "plan" else Status.NUMERIC

    @property
    def diagnosis(self) -> Diagnosis:
        return Diagnosis(name=self.name, sentence=f"{self.stage}: {self.meaning}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageFindings:
    """What is wrong with the stages, first stage first, and sentences about what is not.

    whole: the stages behind the plan were looked at as well, as far as there are some; behind a
    wrong plan that can't be run, or that they don't fit, they weren't. form: shapes or dtypes of
    stages that are wrong by a right plan, and nothing else was looked at.
    """

    faults: tuple[StageFault, ...] = ()
    notes: tuple[str, ...] = ()
    whole: bool = True
    form: FormFault | None = None


def _stage_form(result: V4PrefillResult) -> FormFault | None:
    """Shapes and dtypes of a result's stages; None where they fit its plan, or aren't given."""
    if result.stages is None:
        return None
    if result.plan is None:
        return FormFault(
            status=Status.SHAPE,
            reason="stages came without a plan; one for each chunk of a plan is due",
        )
    if len(result.stages) != len(result.plan):
        return FormFault(
            status=Status.SHAPE,
            reason=f"{len(result.stages)} stages came with {len(result.plan)} chunks; one for each "
            "is due",
        )
    for k, (chunk, stage) in enumerate(zip(result.plan, result.stages, strict=True)):
        count, tokens = chunk.end - chunk.start, chunk.query_end - chunk.query_start
        shapes = {
            "workspace": (stage.workspace, [count, chunk.workspace_rows, 512], ml_dtypes.bfloat16),
            "indices": (stage.indices, [tokens, "C"], np.int32),
            "lengths": (stage.lengths, [tokens], np.int32),
        }
        for name, (array, right, dtype) in shapes.items():
            got = list(array.shape)
            fits = len(got) == len(right) and all(
                d in ("C", g) for g, d in zip(got, right, strict=True)
            )
            if not fits:
                return FormFault(
                    status=Status.SHAPE,
                    reason=f"{name} of chunk {k} has the shape {got}; {right} is due",
                )
            if array.dtype != dtype:
                return FormFault(
                    status=Status.DTYPE,
                    reason=f"{name} of chunk {k} is {array.dtype.name}; {np.dtype(dtype).name} is "
                    "due",
                )
    return None


def judge_stages(evidence: Evidence[V4Witness], result: V4PrefillResult) -> StageFindings:
    """Judges a result's plan and stages, as far as it has them.

    The plan comes first: what a wrong plan makes of shapes says nothing about the stages.
    """
    form = _stage_form(result)
    if result.plan is None:
        return StageFindings(form=form)
    faults = _plan_faults(evidence, result.plan)
    if form is not None:
        if not faults:
            return StageFindings(form=form)
        note = f"rows and indices weren't judged, they don't fit this plan: {form.reason}"
        return StageFindings(faults=tuple(faults), notes=(note,), whole=False)
    if not evidence.witness.flat.runnable(result.plan):
        return StageFindings(faults=tuple(faults), whole=False)
    notes: list[str] = []
    if result.stages is not None:
        gather = _gather_fault(evidence, result.plan, result.stages)
        indices, said = _indices_fault(evidence, result.plan, result.stages)
        faults += [fault for fault in (gather, indices) if fault is not None]
        notes += said
    return StageFindings(faults=tuple(faults), notes=tuple(notes))


def _plan_faults(evidence: Evidence[V4Witness], plan: tuple[PlanChunk, ...]) -> list[StageFault]:
    """Each broken rule once, by its first chunk."""
    broken = {v.rule: v for v in reversed(plan_violations(evidence.inputs, plan))}
    faults = []
    for rule in (rule for rule in NAMES if rule in broken):
        of = "" if rule in ("form", PRESCRIBED) else f"{rule}: "
        faults.append(
            StageFault(
                stage="plan",
                name=NAMES[rule],
                sentence=f"plan: {of}{broken[rule].sentence}",
                meaning=f"{of}{MEANINGS[rule]}",
            )
        )
    return faults


def _gather_fault(
    evidence: Evidence[V4Witness], plan: tuple[PlanChunk, ...], stages: tuple[ChunkStage, ...]
) -> StageFault | None:
    """The first row that holds other bits than those of its key; any NaN is as good as another."""
    flat, kv = evidence.witness.flat, evidence.witness.call.kv
    first, wrong_rows, gathered = None, 0, 0
    for k, (chunk, stage) in enumerate(zip(plan, stages, strict=True)):
        keys = flat.of_chunk(chunk)
        filled = np.flatnonzero(keys != NOTHING)
        got = stage.workspace.reshape(-1, kv.shape[1])[filled]
        wrong = _other_bits(got, kv[keys[filled]])
        gathered += len(filled)
        wrong_rows += int(np.count_nonzero(wrong.any(axis=1)))
        if wrong_rows and first is None:
            at = np.flatnonzero(wrong.any(axis=1))
            first = k, filled[at], int(wrong[at[0]].argmax())
    if first is None:
        return None
    k, rows, column = first
    chunk, stage = plan[k], stages[k]
    request, row = divmod(int(rows[0]), chunk.workspace_rows)
    key = int(flat.of_chunk(chunk)[rows[0]])
    held = stage.workspace[request, row]
    got, right = float(held[column]), float(kv[key, column])
    name, meaning = name_of_gather(evidence, chunk, stage, rows) or (
        "wrong-gather",
        "rows of the workspace don't hold the bits of their keys, as the caches have them, and no "
        "known fault of a gather makes them so",
    )
    sentence = (
        f"gather: workspace[{request}, {row}, {column}] of chunk {k} is {got:g}; {right:g} is "
        f"due, of {flat.name(key)} ({wrong_rows} of {gathered} rows differ){_holds(evidence, held)}"
    )
    return StageFault(
        stage="gather",
        name=name,
        sentence=sentence,
        meaning=meaning,
        worst=Worst(
            tensor=f"workspace of chunk {k}",
            index=(request, row, column),
            got=got,
            expected=right,
            share=math.inf,
        ),
    )


def _holds(evidence: Evidence[V4Witness], row: np.ndarray) -> str:
    """Which key a row holds, if it is one."""
    same = np.flatnonzero(~_other_bits(evidence.witness.call.kv, row[None]).any(axis=1))
    return f"; the row holds {evidence.witness.flat.name(int(same[0]))}" if len(same) else ""


def _indices_fault(
    evidence: Evidence[V4Witness], plan: tuple[PlanChunk, ...], stages: tuple[ChunkStage, ...]
) -> tuple[StageFault | None, list[str]]:
    """The first token whose list is not that of its keys, and a note on lists in another order."""
    reordered, wrong = [], []
    for chunk, stage in zip(plan, stages, strict=True):
        tokens = np.arange(chunk.query_start, chunk.query_end)
        got, right = _lists(evidence, chunk, stage, tokens)
        other = (np.sort(got, axis=1) != np.sort(right, axis=1)).any(axis=1)
        other |= stage.lengths != _right_lengths(evidence, tokens)
        wrong.append(tokens[other])
        reordered.append(tokens[~other & (got != right).any(axis=1)])
    order = np.concatenate([np.zeros(0, np.int64), *reordered])
    bad = np.concatenate([np.zeros(0, np.int64), *wrong])
    notes = []
    if len(order):
        first = evidence.witness.flat.token_name(int(order[0]))
        notes.append(
            f"indices: the same keys in another order than the engine's, in {len(order)} of "
            f"{evidence.num_tokens} tokens, {first} the first"
        )
    if not len(bad):
        return None, notes
    name, meaning = (
        name_of_indices(evidence, plan, stages, bad)
        or _lengths_alone(evidence, plan, stages)
        or (
            "wrong-indices",
            "lists don't name the keys that their tokens see, each as often as it is due, and no "
            "known fault of lists or lengths makes them so",
        )
    )
    token = int(bad[0])
    k = next(k for k, c in enumerate(plan) if c.query_start <= token < c.query_end)
    sentence, worst = _difference(evidence, k, plan[k], stages[k], token)
    sentence += f" ({len(bad)} of {evidence.num_tokens} tokens differ)"
    return (
        StageFault(
            stage="indices",
            name=name,
            sentence=f"indices: {sentence}",
            meaning=meaning,
            worst=worst,
        ),
        notes,
    )


def _lengths_alone(
    evidence: Evidence[V4Witness], plan: tuple[PlanChunk, ...], stages: tuple[ChunkStage, ...]
) -> tuple[str, str] | None:
    """The name of lists that are right up to their due length, and said to be one longer or one
    shorter; None where something else is wrong.
    """
    shifts: set[int] = set()
    for chunk, stage in zip(plan, stages, strict=True):
        tokens = np.arange(chunk.query_start, chunk.query_end)
        lengths = _right_lengths(evidence, tokens)
        got, right = _lists(evidence, chunk, dataclasses.replace(stage, lengths=lengths), tokens)
        if (np.sort(got, axis=1) != np.sort(right, axis=1)).any():
            return None
        shifts |= set((stage.lengths - lengths).tolist())
    words = {1: "one slot too many", -1: "one slot too few"}
    if len(shifts) != 1 or not shifts <= words.keys():
        return None
    return "length-off-by-one", f"each token takes {words[shifts.pop()]}"


def _lists(
    evidence: Evidence[V4Witness],
    chunk: PlanChunk,
    stage: ChunkStage,
    tokens: Int64[np.ndarray, " t"],
) -> tuple[Int64[np.ndarray, "t w"], Int64[np.ndarray, "t w"]]:
    """Each token's keys as flat rows, the candidate's and those that are due; NOTHING for a slot
    that names no key, _PADDED behind a list.
    """
    keys = np.append(evidence.witness.flat.of_chunk(chunk), NOTHING)
    rows = stage.indices.astype(np.int64)
    named = np.where((rows >= 0) & (rows < len(keys) - 1), rows, len(keys) - 1)
    got = np.where(_within(rows, stage.lengths), keys[named], _PADDED)
    flat = evidence.witness.call.indices[tokens].astype(np.int64)
    right = np.where(_within(flat, _right_lengths(evidence, tokens)), flat, _PADDED)
    width = max(got.shape[1], right.shape[1])
    return tuple(  # type: ignore[return-value]
        np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=_PADDED) for a in (got, right)
    )


def _difference(
    evidence: Evidence[V4Witness], k: int, chunk: PlanChunk, stage: ChunkStage, token: int
) -> tuple[str, Worst]:
    """Where a token's list is wrong: a length, a slot that is one too many, a key that lacks."""
    flat, row = evidence.witness.flat, token - chunk.query_start
    length = int(stage.lengths[row])
    right_length = int(_right_lengths(evidence, np.array([token]))[0])
    place, of = f"[{row}] of chunk {k}", flat.token_name(token)
    got, right = (list(a[0]) for a in _lists(evidence, chunk, _row(stage, row), np.array([token])))
    extra, lacking = _surplus(got, right), _surplus(right, got)
    said = []
    worst = Worst(
        tensor=f"lengths of chunk {k}",
        index=(row,),
        got=float(length),
        expected=float(right_length),
        share=math.inf,
    )
    if length != right_length:
        said.append(f"lengths{place} is {length}; {right_length} is due for {of}")
    home = {int(key): i for i, key in enumerate(flat.of_chunk(chunk)) if key != NOTHING}
    lacks = f"row {home[lacking[0][1]]}, {flat.name(lacking[0][1])}," if lacking else ""
    if extra:
        slot = extra[0][0]
        named = int(stage.indices[row, slot])
        expected = float(home[lacking[0][1]]) if lacking else None
        said.append(
            f"indices[{row}, {slot}] of chunk {k} is {named}, "
            f"{flat.workspace_row_name(chunk, named)}; "
            + (f"{lacks} is due" if lacking else "one key too many")
            + ("" if said else f" for {of}")
        )
        if length == right_length:
            worst = Worst(
                tensor=f"indices of chunk {k}",
                index=(row, slot),
                got=float(named),
                expected=expected,
                share=math.inf,
            )
    elif lacking:
        said.append(f"{lacks} is missing")
    return "; ".join(said), worst


def _row(stage: ChunkStage, row: int) -> ChunkStage:
    return ChunkStage(
        workspace=stage.workspace,
        indices=stage.indices[row : row + 1],
        lengths=stage.lengths[row : row + 1],
    )


def _surplus(mine: list[int], theirs: list[int]) -> list[tuple[int, int]]:
    """(place, key) of what one list has beyond the other, padding left out."""
    left = [key for key in theirs if key != _PADDED]
    surplus = []
    for place, key in enumerate(mine):
        if key == _PADDED:
            continue
        if key in left:
            left.remove(key)
        else:
            surplus.append((place, int(key)))
    return surplus


def _right_lengths(
    evidence: Evidence[V4Witness], tokens: Int64[np.ndarray, " t"]
) -> Int64[np.ndarray, " t"]:
    lengths = evidence.witness.call.topk_length
    assert lengths is not None
    return lengths[tokens].astype(np.int64)


def _within(rows: Int64[np.ndarray, "t w"], lengths: np.ndarray) -> Bool[np.ndarray, "t w"]:
    return np.arange(rows.shape[1]) < lengths[:, None]


def _other_bits(mine: np.ndarray, theirs: np.ndarray) -> Bool[np.ndarray, "rows D"]:
    bits = [np.ascontiguousarray(a).view(np.uint16) for a in (mine, theirs)]
    both_nan = np.logical_and(*((b & 0x7FFF) > 0x7F80 for b in bits))
    return (bits[0] != bits[1]) & ~both_nan
