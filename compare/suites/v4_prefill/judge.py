"""The judge of the whole V4 prefill path.

The attention is judged as what it is, one sparse prefill over the keys that each token sees, by the
judge of sparse prefill. Where a result shows its plan and what each chunk had before its attention,
these are judged by themselves: the plan by P1 to P7, the gathered rows by their bits, the indices
by the keys that they name in the candidate's own plan. The first wrong stage comes first.
"""

from __future__ import annotations

import dataclasses

from compare.judging import attention as sparse_prefill
from compare.judging.attention import profile_notes
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.exact_keys import key_difference
from compare.judging.parts import PARTS
from compare.judging.result_view import ResultView, form_fault
from compare.judging.sides import Side
from compare.judging.tolerance import check_profile
from compare.judging.weighing import weigh
from compare.protocol.verdict import Diagnosis, Status, Verdict
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.diagnosis import diagnose
from compare.suites.v4_prefill.evidence import Evidence
from compare.suites.v4_prefill.plan import right_plan
from compare.suites.v4_prefill.stages import StageFault, StageFindings, judge_stages

__all__ = ["Evidence", "judge", "share_by_tensor"]

_VALUE_WIDTH = 512
_OTHER_ATTENTION = "the attention is wrong too, and no known fault explains it"


def judge(
    inputs: V4PrefillInputs,
    candidate: V4PrefillResult,
    reference: V4PrefillResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: Evidence | None = None,
) -> Verdict:
    """What is to be said about a candidate's result on these inputs.

    reference, profile, evidence: as for sparse prefill. A result with a wrong plan has the status
    PLAN, one with wrong rows or indices NUMERIC, unless its tensors are wrong in another way; right
    tensors don't make up for a wrong stage.

    ValueError: an unknown profile, or inputs that no implementation may be given.
    """
    check_profile(profile)
    T, H, _ = inputs.q.shape
    if fault := form_fault(plain(candidate), T, H, _VALUE_WIDTH):
        return Verdict(status=fault.status, reason=fault.reason, rows_total=T * H)
    evidence = evidence or Evidence(inputs)
    found = judge_stages(evidence, candidate)
    if fault := found.form:
        return Verdict(status=fault.status, reason=fault.reason, rows_total=T * H)
    reference_failed = None
    if reference is not None:
        reference_failed = _form_or_stages(evidence, reference)
        reference = None if reference_failed else reference
    said = [] if reference is None else [f"reference: {note}" for note in reference.notes]
    verdict = weigh(
        evidence,
        Side(view(candidate), inputs.case),
        None if reference is None else Side(view(reference), inputs.case),
        profile=profile,
        reference_failed=reference_failed,
        explain=lambda side, suspects: _explain(evidence, candidate, found, side, suspects),
        more=lambda side: _keys_in_words(evidence, side),
        notes=(
            *candidate.notes,
            *said,
            *evidence.notes,
            *found.notes,
            *profile_notes(inputs.case, profile),
        ),
        not_compared=tuple(
            name for name in ("max_logits", "plan", "stages") if getattr(candidate, name) is None
        ),
        rowless=Status.UNSUPPORTED if candidate.plan is None else Status.PASS,
    )
    return _with_stages(evidence, candidate, found, verdict)


def share_by_tensor(
    inputs: V4PrefillInputs, result: V4PrefillResult, evidence: Evidence
) -> dict[str, float]:
    """The largest share of the calibrated bounds that a well-formed result uses; as for sparse
    prefill."""
    return sparse_prefill.share_by_tensor(evidence.inputs, plain(result), evidence)


def plain(result: V4PrefillResult) -> SparsePrefillResult:
    """The tensors of a result, without its plan and stages."""
    return SparsePrefillResult(
        out=result.out, lse=result.lse, max_logits=result.max_logits, out_rows=result.out_rows
    )


def view(result: V4PrefillResult) -> ResultView:
    """A result's rows as the judge reads them."""
    rounded = 0 if result.parts is None else PARTS.index(result.parts)
    merged = result.parts is not None
    return ResultView(plain(result), merges_parts=merged, rounded_parts=rounded)


def _form_or_stages(evidence: Evidence, reference: V4PrefillResult) -> str | None:
    """Why a reference can't be believed, apart from its numbers."""
    T, H, _ = evidence.path.q.shape
    if fault := form_fault(plain(reference), T, H, _VALUE_WIDTH):
        return fault.reason
    found = judge_stages(evidence, reference)
    if found.form is not None:
        return found.form.reason
    return found.faults[0].sentence if found.faults else None


def _explain(
    evidence: Evidence,
    candidate: V4PrefillResult,
    found: StageFindings,
    side: Side,
    suspects: list[int],
) -> tuple[Diagnosis, ...]:
    """The faults that the tensors show. Stages that are wrong say so themselves; those that are
    right leave the attention.
    """
    if any(fault.stage != "plan" for fault in found.faults) or not found.whole:
        return ()
    staged = candidate.stages is not None
    plan = right_plan(evidence.path) if candidate.plan is None else candidate.plan
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
    evidence: Evidence, candidate: V4PrefillResult, found: StageFindings, verdict: Verdict
) -> Verdict:
    """The verdict on the tensors, with what is wrong with the stages in front of it."""
    if not found.faults:
        return verdict
    faults = list(found.faults)
    if any(fault.stage != "plan" for fault in faults):
        faults += _attention_faults(evidence, candidate)
    status = verdict.status
    if not status.failed:
        status = Status.PLAN if faults[0].stage == "plan" else Status.NUMERIC
    worst = tuple(fault.worst for fault in faults if fault.worst is not None)
    return dataclasses.replace(
        verdict,
        status=status,
        reason="; ".join([*(fault.sentence for fault in faults), verdict.reason]).removesuffix(
            "; "
        ),
        diagnosis=(*(fault.diagnosis for fault in faults), *verdict.diagnosis),
        worst=(*worst, *verdict.worst),
    )


def _attention_faults(evidence: Evidence, candidate: V4PrefillResult) -> list[StageFault]:
    """Whether the attention is wrong too: over the candidate's own workspace and indices. Only the
    first such chunk is told. [] where its lists can't be given to any attention.
    """
    if candidate.plan is None or candidate.stages is None or candidate.out_rows is not None:
        return []
    path = evidence.path
    for k, (chunk, stage) in enumerate(zip(candidate.plan, candidate.stages, strict=True)):
        rows = slice(chunk.query_start, chunk.query_end)
        if ((stage.lengths < 0) | (stage.lengths > stage.indices.shape[1])).any():
            continue
        call = SparsePrefillInputs(
            q=path.q[rows],
            kv=stage.workspace.reshape(-1, stage.workspace.shape[-1]),
            indices=stage.indices,
            sm_scale=path.sm_scale,
            attn_sink=path.attn_sink,
            topk_length=stage.lengths,
        )
        maxima = candidate.max_logits
        result = SparsePrefillResult(
            out=candidate.out[rows],
            lse=candidate.lse[rows],
            max_logits=None if maxima is None else maxima[rows],
        )
        own = sparse_prefill.Evidence(call, evidence.device)
        verdict = sparse_prefill.judge(call, result, evidence=own)
        if verdict.status.failed:
            known = verdict.diagnosis[0] if verdict.diagnosis else None
            over = f"over the workspace and indices of chunk {k}, such as they are, "
            return [
                StageFault(
                    stage="attention",
                    name=known.name if known else "wrong-attention",
                    sentence=f"attention: {over}{verdict.reason}",
                    meaning=f"{over}{known.sentence if known else _OTHER_ATTENTION}",
                )
            ]
    return []


def _keys_in_words(evidence: Evidence, side: Side) -> list[str]:
    """On exact data, which key a wrong row lacks or has too many."""
    if not side.exact or "out" not in side.numbers.calibrated_failures:
        return []
    worst = side.numbers.worst["out"]
    said = key_difference(evidence, side.view, worst, name=evidence.flat.name)
    request, position = evidence.flat.token(int(worst.index[0]))
    return [f"{sentence} (request {request}, position {position})" for sentence in said]
