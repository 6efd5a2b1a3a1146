"""The judge of the whole V4 prefill path.

The attention is judged as what it is, one sparse prefill over the keys that each token sees, by the
judge of sparse prefill. Where a result shows its plan and what each chunk had before its attention,
these are judged by themselves: the plan by P1 to P7, the gathered rows by their bits, the indices
by the keys that they name in the candidate's own plan. The first wrong stage comes first.
"""

from __future__ import annotations

import dataclasses

from compare.judging import attention
from compare.judging.attention_call import PARTS, SparsePrefillInputs, SparsePrefillResult
from compare.judging.evidence import Evidence
from compare.judging.exact_keys import key_difference
from compare.judging.plans import PlanChunk
from compare.judging.result_view import FormFault, ResultView, form_fault
from compare.judging.sides import Side
from compare.judging.tolerance import check_profile
from compare.judging.verdicts import NO_ROWS, Remarks, refusal, verdict_on
from compare.protocol.verdict import Diagnosis, Status, Verdict
from compare.suites.v4_prefill.call import ChunkStage, V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.diagnosis import diagnose
from compare.suites.v4_prefill.evidence import V4Witness, evidence_of
from compare.suites.v4_prefill.plan import right_plan
from compare.suites.v4_prefill.stages import StageFault, StageFindings, judge_stages

__all__ = ["evidence_of", "judge", "side_of"]

_VALUE_WIDTH = 512
_OTHER_ATTENTION = "the attention is wrong too, and no known fault explains it"


def judge(
    inputs: V4PrefillInputs,
    candidate: V4PrefillResult,
    reference: V4PrefillResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: Evidence[V4Witness] | None = None,
) -> Verdict:
    """Judges a candidate's result on these inputs.

    reference, profile, evidence: as for sparse prefill. A result with a wrong plan has the status
    PLAN, one with wrong rows or indices NUMERIC, unless its tensors are wrong in another way; right
    tensors don't make up for a wrong stage.

    ValueError: an unknown profile, or inputs that no implementation may be given.
    """
    check_profile(profile)
    if fault := _form(inputs, candidate):
        return refusal(inputs, fault)
    evidence = evidence or evidence_of(inputs)
    stages = judge_stages(evidence, candidate)
    if stages.form is not None:
        return refusal(inputs, stages.form)
    other = None
    if reference is not None:
        other = _form_or_stages(evidence, reference) or side_of(inputs, reference)
    verdict = verdict_on(
        evidence,
        side_of(inputs, candidate),
        other,
        Remarks(
            diagnose=lambda side, suspects: _explain(evidence, candidate, stages, side, suspects),
            details=lambda side: _keys_in_words(evidence.witness, side),
            notes=(*stages.notes, *attention.profile_notes(inputs.case, profile)),
        ),
        profile=profile,
    )
    return _with_stages(evidence, candidate, stages, verdict)


def side_of(inputs: V4PrefillInputs, result: V4PrefillResult) -> Side:
    """A well-formed result's tensors, to be measured."""
    view = ResultView(
        _tensors(result),
        merges_parts=result.parts is not None,
        rounded_parts=0 if result.parts is None else PARTS.index(result.parts),
    )
    return Side(view, inputs.case, notes=result.notes)


def _tensors(result: V4PrefillResult) -> SparsePrefillResult:
    """The result without its plan and stages."""
    return SparsePrefillResult(
        out=result.out, lse=result.lse, max_logits=result.max_logits, out_rows=result.out_rows
    )


def _form(inputs: V4PrefillInputs, result: V4PrefillResult) -> FormFault | None:
    T, H, _ = inputs.q.shape
    return form_fault(_tensors(result), T, H, _VALUE_WIDTH)


def _form_or_stages(evidence: Evidence[V4Witness], reference: V4PrefillResult) -> FormFault | None:
    """Why a reference can't be believed, apart from its numbers."""
    if fault := _form(evidence.inputs, reference):
        return fault
    stages = judge_stages(evidence, reference)
    if stages.form is not None or not stages.faults:
        return stages.form
    return FormFault(status=stages.faults[0].status, reason=stages.faults[0].sentence)


def _explain(
    evidence: Evidence[V4Witness],
    candidate: V4PrefillResult,
    stages: StageFindings,
    side: Side,
    suspects: list[int],
) -> tuple[Diagnosis, ...]:
    """The faults that the tensors show. Stages that are wrong say so themselves; those that are
    right leave the attention.
    """
    if any(fault.stage != "plan" for fault in stages.faults) or not stages.whole:
        return ()
    staged = candidate.stages is not None
    plan = right_plan(evidence.inputs) if candidate.plan is None else candidate.plan
    named = diagnose(evidence, side.view, suspects, side.special, plan, path=not staged)
    if not staged:
        return named
    if not named:
        named = (
            Diagnosis(
                name="wrong-attention",
                sentence="rows and indices are right, what is made of them isn't",
            ),
        )
    return tuple(
        dataclasses.replace(diagnosis, sentence=f"attention: {diagnosis.sentence}")
        for diagnosis in named
    )


def _with_stages(
    evidence: Evidence[V4Witness],
    candidate: V4PrefillResult,
    stages: StageFindings,
    verdict: Verdict,
) -> Verdict:
    """The verdict on the tensors, with what is wrong with the stages in front of it."""
    missing = [name for name in ("plan", "stages") if getattr(candidate, name) is None]
    verdict = dataclasses.replace(verdict, not_compared=(*verdict.not_compared, *missing))
    if candidate.plan is not None and verdict.reason == NO_ROWS:
        # Without any row the plan was compared all the same.
        verdict = dataclasses.replace(
            verdict, status=Status.PASS, reason="", share=max(verdict.shares.values())
        )
    if not stages.faults:
        return verdict
    faults = list(stages.faults)
    if any(fault.stage != "plan" for fault in faults):
        fault = _attention_fault(evidence, candidate)
        faults += [] if fault is None else [fault]
    worst = tuple(fault.worst for fault in faults if fault.worst is not None)
    reasons = [fault.sentence for fault in faults]
    return dataclasses.replace(
        verdict,
        status=verdict.status if verdict.status.failed else faults[0].status,
        reason="; ".join([*reasons, verdict.reason] if verdict.reason else reasons),
        diagnosis=(*(fault.diagnosis for fault in faults), *verdict.diagnosis),
        worst=(*worst, *verdict.worst),
    )


def _attention_fault(
    evidence: Evidence[V4Witness], candidate: V4PrefillResult
) -> StageFault | None:
    """Whether the attention is wrong too, over the candidate's own workspace and indices: the first
    chunk where it is. None where that can't be said.
    """
    if candidate.plan is None or candidate.stages is None or candidate.out_rows is not None:
        return None
    for k, (chunk, stage) in enumerate(zip(candidate.plan, candidate.stages, strict=True)):
        if ((stage.lengths < 0) | (stage.lengths > stage.indices.shape[1])).any():
            continue  # no attention takes such lists
        call, result = _call_of_chunk(evidence.inputs, candidate, chunk, stage)
        own = attention.evidence_of(call, evidence.device)
        verdict = attention.judge(call, result, evidence=own)
        if not verdict.status.failed:
            continue
        name, meaning = "wrong-attention", _OTHER_ATTENTION
        if verdict.diagnosis:
            name, meaning = verdict.diagnosis[0].name, verdict.diagnosis[0].sentence
        over = f"over the candidate's own workspace and indices of chunk {k}, "
        return StageFault(
            stage="attention",
            name=name,
            sentence=f"attention: {over}{verdict.reason}",
            meaning=f"{over}{meaning}",
        )
    return None


def _call_of_chunk(
    inputs: V4PrefillInputs, candidate: V4PrefillResult, chunk: PlanChunk, stage: ChunkStage
) -> tuple[SparsePrefillInputs, SparsePrefillResult]:
    """A chunk's attention as one sparse prefill over its workspace, and the candidate's rows."""
    rows = slice(chunk.query_start, chunk.query_end)
    call = SparsePrefillInputs(
        q=inputs.q[rows],
        kv=stage.workspace.reshape(-1, stage.workspace.shape[-1]),
        indices=stage.indices,
        sm_scale=inputs.sm_scale,
        attn_sink=inputs.attn_sink,
        topk_length=stage.lengths,
    )
    maxima = candidate.max_logits
    result = SparsePrefillResult(
        out=candidate.out[rows],
        lse=candidate.lse[rows],
        max_logits=None if maxima is None else maxima[rows],
    )
    return call, result


def _keys_in_words(witness: V4Witness, side: Side) -> list[str]:
    """On exact data, which key a wrong row lacks or has too many."""
    said = key_difference(witness.attention, side, name=witness.flat.name)
    if not said:
        return []
    request, position = witness.flat.token(int(side.numbers.worst["out"].index[0]))
    return [f"{sentence} (request {request}, position {position})" for sentence in said]
