"""The judge of the V4 prefill path: each stage by itself, the attention as one sparse prefill."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from compare.judging.evidence import Evidence
from compare.judging.sides import share_by_tensor
from compare.protocol.arrays import to_numpy, to_torch
from compare.protocol.report import Report, Row
from compare.protocol.verdict import Status, Verdict
from compare.report.text import failure_lines
from compare.suites.table import make_inputs, parse_case
from compare.suites.v4_prefill.call import ChunkStage, V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.judge import evidence_of, judge, side_of
from compare.suites.v4_prefill.torch_adapter import TorchV4Prefill
from torch_ref import merge_states, sparse_prefill, sparse_prefill_oracle
from torch_ref.v4.variants import V4Variant, variant_call

# Two requests in a chunk, M = 44 rows: 15 entries and 29 positions of the second, 10 and 27.
CASE = "v4-prefill:seq=40+60,q=4+6,h=3,topk=12,window=24,sink=1.0,seed=8301"
M, N = 44, 15


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return evidence_of(inputs_of(CASE))


@pytest.fixture(scope="module")
def right(evidence: Evidence) -> V4PrefillResult:
    return TorchV4Prefill("torch").run(evidence.inputs)


@pytest.fixture(scope="module")
def exact() -> Evidence:
    return evidence_of(
        inputs_of("v4-prefill:seq=40+60,q=4+6,h=4,topk=12,window=24,data=exact,seed=8303")
    )


def inputs_of(case: str) -> V4PrefillInputs:
    inputs = make_inputs(parse_case(case))
    assert isinstance(inputs, V4PrefillInputs)
    return inputs


def verdict_of(evidence: Evidence, result: V4PrefillResult, **options: object) -> Verdict:
    return judge(evidence.inputs, result, evidence=evidence, **options)  # type: ignore[arg-type]


def with_stage(result: V4PrefillResult, **changes: np.ndarray) -> V4PrefillResult:
    """The result with its first chunk's arrays changed; its tensors stay."""
    assert result.stages is not None
    first = dataclasses.replace(result.stages[0], **changes)
    return dataclasses.replace(result, stages=(first, *result.stages[1:]))


def stage_of(result: V4PrefillResult) -> ChunkStage:
    """A copy of the first chunk's arrays."""
    assert result.stages is not None
    stage = result.stages[0]
    return ChunkStage(
        workspace=stage.workspace.copy(),
        indices=stage.indices.copy(),
        lengths=stage.lengths.copy(),
    )


def names(verdict: Verdict) -> list[str]:
    return [found.name for found in verdict.diagnosis]


def test_a_right_result_passes_with_all_of_it_compared(evidence, right):
    verdict = verdict_of(evidence, right)
    assert verdict.status is Status.PASS
    assert verdict.not_compared == () and verdict.notes == ()
    assert verdict.rows_judged == verdict.rows_total == 30
    shares = share_by_tensor(evidence, side_of(evidence.inputs, right))
    assert max(shares.values()) == verdict.share


def test_what_a_result_does_not_show_is_said_and_the_rest_is_judged(evidence, right):
    bare = dataclasses.replace(right, plan=None, stages=None, max_logits=None)
    verdict = verdict_of(evidence, bare)
    assert verdict.status is Status.PASS
    assert verdict.not_compared == ("max_logits", "plan", "stages")
    assert verdict_of(evidence, dataclasses.replace(right, stages=None)).not_compared == ("stages",)


def test_rows_of_out_that_are_recorded_are_judged(evidence, right):
    rows = np.array([3, 17, 29])
    recorded = dataclasses.replace(
        right, out=right.out.reshape(30, 512)[rows], out_rows=rows, plan=None, stages=None
    )
    assert verdict_of(evidence, recorded).status is Status.PASS
    recorded.out[1] += 1.0
    assert verdict_of(evidence, recorded).worst[0].index[:2] == (5, 2)


def test_a_gathered_row_of_other_bits_is_named_with_both_values(evidence, right):
    stage = stage_of(right)
    stage.workspace[1, N + 3, 17] = 0.5
    due = right.stages[0].workspace[1, N + 3, 17]
    verdict = verdict_of(evidence, with_stage(right, workspace=stage.workspace))
    # Right tensors don't make up for it: the attention isn't that of this workspace.
    assert verdict.status is Status.NUMERIC
    assert names(verdict)[0] == "wrong-gather"
    assert verdict.reason.startswith(
        f"gather: workspace[1, {N + 3}, 17] of chunk 0 is 0.5; {float(due):g} is due, of position "
        "34 of request 1 (1 of 81 rows differ); attention: "
    )
    assert verdict.worst[0].index == (1, N + 3, 17)
    assert (verdict.worst[0].got, verdict.worst[0].expected) == (0.5, float(due))


def test_a_row_that_holds_another_key_says_whose(evidence, right):
    stage = stage_of(right)
    stage.workspace[0, 2] = stage.workspace[1, 5]
    verdict = verdict_of(evidence, with_stage(right, workspace=stage.workspace))
    first = verdict.reason.split("; attention: ")[0]
    assert "of compressed entry 2 of request 0" in first
    assert first.endswith("the row holds compressed entry 5 of request 1")


def test_rows_that_nothing_is_gathered_to_hold_anything(evidence, right):
    stage = stage_of(right)
    assert np.isnan(stage.workspace[0, 10:N].astype(np.float32)).all()
    stage.workspace[0, 10:N] = 7.0
    stage.workspace[0, N + 27 :] = math.inf
    verdict = verdict_of(evidence, with_stage(right, workspace=stage.workspace))
    assert verdict.status is Status.PASS


def test_a_sign_of_zero_is_a_difference_of_bits(exact):
    right = TorchV4Prefill("torch").run(exact.inputs)
    stage = stage_of(right)
    row, column = np.argwhere(stage.workspace[1, :N].astype(np.float32) == 0.0)[0]
    stage.workspace[1, row, column] = -stage.workspace[1, row, column]
    verdict = verdict_of(exact, with_stage(right, workspace=stage.workspace))
    # The attention is over the other zero, which changes nothing.
    assert names(verdict) == ["wrong-gather"]


def test_an_index_of_another_key_is_named_with_both_keys(evidence, right):
    stage = stage_of(right)
    # Token 5 is request 1's second, at position 55: 12 of its entries, then positions 32 to 55.
    assert stage.indices[5, 12] == M + N + 1
    stage.indices[5, 12] = N
    verdict = verdict_of(evidence, with_stage(right, indices=stage.indices))
    assert names(verdict)[0] == "wrong-indices"
    assert verdict.reason.startswith(
        f"indices: indices[5, 12] of chunk 0 is {N}, position 13 of request 0; row {M + N + 1}, "
        "position 32 of request 1, is due for token 5 (request 1, position 55) (1 of 10 tokens "
        "differ); attention: "
    )
    assert (verdict.worst[0].got, verdict.worst[0].expected) == (N, M + N + 1)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (12, "12, a row of request 0 that nothing is gathered to; row"),
        (2 * M, "88, outside of the workspace's 88 rows; row"),
        (-1, "-1, outside of the workspace's 88 rows; row"),
    ],
)
def test_a_row_that_is_no_key_is_a_fault_where_a_list_names_it(evidence, right, row, words):
    stage = stage_of(right)
    stage.indices[5, 12] = row
    verdict = verdict_of(evidence, with_stage(right, indices=stage.indices))
    assert f"indices[5, 12] of chunk 0 is {words}" in verdict.reason


def test_behind_a_list_anything_may_stand(evidence, right):
    stage = stage_of(right)
    for row, length in zip(stage.indices, stage.lengths, strict=True):
        row[length:] = 3
    assert verdict_of(evidence, with_stage(right, indices=stage.indices)).status is Status.PASS


def test_a_key_counts_as_often_as_it_is_due(evidence, right):
    stage = stage_of(right)
    stage.indices[5, 12] = stage.indices[5, 13]
    verdict = verdict_of(evidence, with_stage(right, indices=stage.indices))
    assert "indices[5, 13] of chunk 0 is" in verdict.reason
    assert "position 32 of request 1, is due" in verdict.reason


def test_the_same_keys_in_another_order_are_a_note(evidence, right):
    stage = stage_of(right)
    stage.indices[5, :20] = stage.indices[5, :20][::-1].copy()
    verdict = verdict_of(evidence, with_stage(right, indices=stage.indices))
    assert verdict.status is Status.PASS
    assert verdict.notes == (
        "indices: the same keys in another order than the engine's, in 1 of 10 tokens, token 5 "
        "(request 1, position 55) the first",
    )


def test_lengths_are_exact(evidence, right):
    stage = stage_of(right)
    stage.lengths[2] += 1
    verdict = verdict_of(evidence, with_stage(right, lengths=stage.lengths))
    assert "lengths[2] of chunk 0 is 34; 33 is due for token 2 (request 0, pos" in verdict.reason
    stage.lengths[2] -= 2
    verdict = verdict_of(evidence, with_stage(right, lengths=stage.lengths))
    assert "lengths[2] of chunk 0 is 32; 33 is due" in verdict.reason
    assert "position 38 of request 0, is missing" in verdict.reason


def test_a_plan_that_breaks_a_rule_is_named_first(evidence, right):
    stage = stage_of(right)
    wide = np.full((2, M + 400, 512), np.nan, ml_dtypes.bfloat16)
    wide[:, :M] = stage.workspace
    indices = np.where(stage.indices >= M, stage.indices + 400, stage.indices).astype(np.int32)
    chunk = dataclasses.replace(right.plan[0], workspace_rows=M + 400)
    result = dataclasses.replace(with_stage(right, workspace=wide, indices=indices), plan=(chunk,))
    verdict = verdict_of(evidence, result)
    # Its rows and indices are judged by its own plan, and are right.
    assert verdict.status is Status.PLAN
    assert names(verdict) == ["not-the-shipped-plan"]
    assert verdict.reason.startswith("plan: P5: chunk 0 (requests 0 to 1) has N = ")


def with_plan(result: V4PrefillResult, **more: int) -> V4PrefillResult:
    """The result with sizes of its first chunk changed by so much; its stages stay."""
    assert result.plan is not None
    first = result.plan[0]
    first = dataclasses.replace(first, **{f: getattr(first, f) + by for f, by in more.items()})
    return dataclasses.replace(result, plan=(first, *result.plan[1:]))


@pytest.mark.parametrize(
    ("more", "name", "words", "due"),
    [
        ({"workspace_rows": -1}, "workspace-size", "P6: chunk 0 (requests 0 to 1) has 28 win", 43),
        ({"workspace_rows": 1}, "not-the-shipped-plan", "P5: chunk 0 (requests 0 to 1) has", 45),
    ],
)
def test_a_wrong_plan_is_named_where_its_stages_do_not_fit_it(
    evidence, right, more, name, words, due
):
    wrong = with_plan(right, **more)
    verdict = verdict_of(evidence, wrong)
    assert (verdict.status, names(verdict)) == (Status.PLAN, [name])
    assert verdict.reason.startswith(f"plan: {words}")
    assert "has the shape" not in verdict.reason
    assert verdict.notes == (
        "rows and indices weren't judged, they don't fit this plan: workspace of chunk 0 has the "
        f"shape [2, 44, 512]; [2, {due}, 512] is due",
    )
    # Nothing is said of rows and indices where the tensors are wrong as well.
    base2 = verdict_of(evidence, dataclasses.replace(wrong, lse=right.lse / math.log(2)))
    assert (base2.status, names(base2)) == (Status.NUMERIC, [name])
    failed = verdict_of(evidence, right, reference=wrong).reference_failed
    assert failed is not None
    assert failed.startswith(f"plan: {words}")


def test_a_wrong_plan_is_named_before_a_number_of_stages(evidence, right):
    verdict = verdict_of(evidence, dataclasses.replace(with_plan(right, query_end=-1), stages=()))
    assert (verdict.status, names(verdict)) == (Status.PLAN, ["chunk-range"])
    assert "0 stages came with 1 chunks" in verdict.notes[0]


def test_a_plan_that_cannot_be_run_ends_the_look_at_stages(evidence, right):
    chunk = dataclasses.replace(right.plan[0], query_end=9)
    stage = stage_of(right)
    result = with_stage(right, indices=stage.indices[:9], lengths=stage.lengths[:9])
    verdict = verdict_of(evidence, dataclasses.replace(result, plan=(chunk,)))
    assert (verdict.status, names(verdict)) == (Status.PLAN, ["chunk-range"])
    assert "tokens [0, 9); its requests have [0, 10)" in verdict.reason


def test_attention_over_right_stages_is_the_attention(evidence, right):
    verdict = verdict_of(evidence, dataclasses.replace(right, lse=right.lse / math.log(2)))
    assert names(verdict) == ["lse-base-2"]
    assert verdict.diagnosis[0].sentence.startswith("attention: lse is in base 2")
    out = right.out.copy()
    out[4, 1, 100] += 1.0
    verdict = verdict_of(evidence, dataclasses.replace(right, out=out))
    assert (verdict.status, names(verdict)) == (Status.NUMERIC, ["wrong-attention"])
    assert verdict.worst[0].index == (4, 1, 100)


def test_two_wrong_stages_are_both_named_the_first_first(evidence, right):
    """A workspace of doubled keys, indices without a base, attended to rightly but in base 2."""
    stage = stage_of(right)
    stage.workspace[...] = (stage.workspace.astype(np.float32) * 2).astype(ml_dtypes.bfloat16)
    stage.indices[4:] = np.where(stage.indices[4:] >= 0, stage.indices[4:] - M, -1)
    found = sparse_prefill(
        to_torch(evidence.inputs.q),
        to_torch(stage.workspace.reshape(-1, 512)),
        to_torch(stage.indices),
        evidence.inputs.sm_scale,
        attn_sink=to_torch(evidence.inputs.attn_sink),
        topk_length=to_torch(stage.lengths),
    )
    result = dataclasses.replace(
        with_stage(right, **vars(stage)),
        out=to_numpy(found.out, "out"),
        max_logits=found.max_logits.numpy(),
        lse=found.lse.numpy(),
    )
    verdict = verdict_of(evidence, result)
    assert names(verdict) == ["wrong-gather", "request-base-missing"]
    verdict = verdict_of(evidence, dataclasses.replace(result, lse=result.lse / math.log(2)))
    assert names(verdict) == ["wrong-gather", "request-base-missing", "lse-base-2"]
    assert verdict.diagnosis[2].sentence.startswith(
        "attention: over the candidate's own workspace and indices of chunk 0, lse is in base 2"
    )


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda r: dataclasses.replace(r, plan=None), Status.SHAPE, "stages came without a plan"),
        (
            lambda r: dataclasses.replace(r, stages=()),
            Status.SHAPE,
            "0 stages came with 1 chunks; one for each is due",
        ),
        (
            lambda r: with_stage(r, workspace=stage_of(r).workspace[:, :-1]),
            Status.SHAPE,
            "workspace of chunk 0 has the shape [2, 43, 512]; [2, 44, 512] is due",
        ),
        (
            lambda r: with_stage(r, indices=stage_of(r).indices[:-1]),
            Status.SHAPE,
            "indices of chunk 0 has the shape [9, 128]; [10, 'C'] is due",
        ),
        (
            lambda r: with_stage(r, lengths=stage_of(r).lengths.astype(np.int64)),
            Status.DTYPE,
            "lengths of chunk 0 is int64; int32 is due",
        ),
        (
            lambda r: with_stage(r, workspace=stage_of(r).workspace.astype(np.float32)),
            Status.DTYPE,
            "workspace of chunk 0 is float32; bfloat16 is due",
        ),
        (
            lambda r: dataclasses.replace(r, out=r.out[:9]),
            Status.SHAPE,
            "out has the shape [9, 3, 512]; [10, 3, 512] is due",
        ),
    ],
)
def test_a_form_that_does_not_fit_is_named(evidence, right, change, status, words):
    verdict = verdict_of(evidence, change(right))
    assert (verdict.status, verdict.reason) == (status, verdict.reason)
    assert verdict.reason.startswith(words)


def test_a_reference_with_a_wrong_stage_is_not_believed(evidence, right):
    stage = stage_of(right)
    stage.indices[5, 12] = 0
    wrong = with_stage(right, indices=stage.indices)
    verdict = verdict_of(evidence, right, reference=wrong)
    assert verdict.status is Status.PASS
    assert verdict.reference_failed is not None
    assert verdict.reference_failed.startswith("indices: indices[5, 12] of chunk 0 is 0, ")
    assert not verdict.against_reference
    assert verdict_of(evidence, right, reference=right).against_reference["out"].max_abs == 0.0


def test_an_unknown_profile_is_refused(evidence, right):
    with pytest.raises(ValueError, match="profile: 'loose'; accepted are calibrated, "):
        verdict_of(evidence, right, profile="loose")


def test_flashmlas_profile_is_that_of_sparse_prefill(evidence, right):
    verdict = verdict_of(evidence, right, profile="flashmla")
    assert verdict.notes[0].startswith("FlashMLA's tolerances are made for its own data")


def test_each_diagnosis_of_a_stage_says_what_the_fault_is(evidence, right):
    stage = stage_of(right)
    stage.workspace[1, N + 3, 17] = 0.5
    stage.indices[5, 12] = N
    wrong = with_plan(with_stage(right, **vars(stage)), workspace_rows=-1)
    (size,) = verdict_of(evidence, wrong).diagnosis
    assert (size.name, size.sentence) == (
        "workspace-size",
        "plan: P6: N or M - N is too small for a request of the chunk, one without query tokens "
        "counts too, or requests * M exceeds the area",
    )
    verdict = verdict_of(evidence, with_stage(right, **vars(stage)))
    assert names(verdict) == ["wrong-gather", "wrong-indices", "wrong-attention"]
    said = [found.sentence for found in verdict.diagnosis]
    assert said[0].startswith("gather: rows of the workspace don't hold the bits of their keys")
    assert said[1].startswith("indices: lists don't name the keys that their tokens see")
    assert said[2].endswith("the attention is wrong too, and no known fault explains it")
    # A report gives the place in the reason and these words beside the name.
    row = Row(case=CASE, candidate="mine", reference=None, verdict=verdict, seconds=0.0)
    report = Report(rows=(row,), environment={}, profile="calibrated")
    lines = [line for line in failure_lines(row, report) if line.startswith("diagnosis ")]
    assert lines == [f"diagnosis {found.name}: {found.sentence}" for found in verdict.diagnosis]


def test_a_batch_without_tokens_has_nothing_to_be_wrong():
    for case in ("v4-prefill:seq=none,q=none,h=2,seed=1", "v4-prefill:seq=9+30,q=0+0,h=2,seed=1"):
        inputs = inputs_of(case)
        result = TorchV4Prefill("torch").run(inputs)
        assert result.plan == () == result.stages
        assert judge(inputs, result).status is Status.PASS


def test_on_exact_data_the_missing_and_the_foreign_key_have_their_names(exact):
    inputs, right = exact.inputs, TorchV4Prefill("torch").run(exact.inputs)
    assert verdict_of(exact, right).status is Status.PASS
    for shift, words in (
        (-1, "lacks position 32 of request 1 of slot 12"),
        (1, "counts position 31 of request 1, which its token doesn't see"),
    ):
        variant = V4Variant(window_shift=shift)
        call = variant_call(exact.witness.arguments, variant, right.plan, [5], through="cache").call
        found = sparse_prefill(
            exact.witness.arguments.q[5:6], call.kv, call.indices, inputs.sm_scale,
            topk_length=call.topk_length,
        )  # fmt: skip
        out, lse = right.out.copy(), right.lse.copy()
        out[5], lse[5] = to_numpy(found.out, "out")[0], to_numpy(found.lse, "lse")[0]
        bare = V4PrefillResult(out=out, lse=lse, max_logits=right.max_logits)
        verdict = verdict_of(exact, bare)
        assert words in verdict.reason
        assert "(request 1, position 55)" in verdict.reason


def test_on_exact_data_only_a_kernel_that_splits_its_keys_may_round(exact):
    """3 keys and the others, each divided by their own sum and merged in float32."""
    call = exact.witness.call
    parts = []
    for part in (np.s_[:, :3], np.s_[:, 3:]):
        indices = np.full_like(call.indices, -1)
        indices[part] = call.indices[part]
        found = sparse_prefill_oracle(
            *map(to_torch, (call.q, call.kv, indices)), call.sm_scale,
            topk_length=to_torch(call.topk_length),
        )  # fmt: skip
        lse = found.lse.masked_fill(found.lse == math.inf, -math.inf)
        parts.append((found.out.float(), lse.float()))
    merged = merge_states([out for out, _ in parts], [lse for _, lse in parts])
    split = V4PrefillResult(
        out=merged.out.numpy().astype(ml_dtypes.bfloat16), lse=merged.lse.numpy(), parts="float32"
    )
    assert verdict_of(exact, split).status is Status.PASS
    whole = dataclasses.replace(split, parts=None)
    assert verdict_of(exact, whole).status is Status.NUMERIC
