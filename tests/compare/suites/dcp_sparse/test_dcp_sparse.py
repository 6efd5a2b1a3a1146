"""Sparse attention over DCP ranks: inputs, right candidates and wrong ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import compare
from compare.generate.lists import token_positions
from compare.generate.ownership import local_positions, owned_positions
from compare.judging.faults import Sample
from compare.judging.sides import share_by_tensor
from compare.protocol.case import CaseError
from compare.protocol.verdict import Status
from compare.run import registry
from compare.suites.dcp_sparse.call import DcpSparseInputs, DcpSparseResult
from compare.suites.dcp_sparse.faults import FAULTS, faults_of
from compare.suites.dcp_sparse.judge import evidence_of, judge, side_of
from compare.suites.table import default_cases, make_inputs, parse_case
from compare.user.implementation import UserImplementation

(DEFAULT,) = map(str, default_cases("dcp-sparse"))
EXACT = "dcp-sparse:lens=150+3+0+90,q=2+5+0+3,h=5,topk=24,page=16,world=3,data=exact,seed=9101"
ONE_RANK = "dcp-sparse:lens=70,q=2,h=3,topk=20,page=16,world=1,seed=9102"
LINES = (DEFAULT, EXACT, ONE_RANK)


def inputs_of(line: str) -> DcpSparseInputs:
    made = make_inputs(parse_case(line))
    assert isinstance(made, DcpSparseInputs)
    return made


@compare.candidate(framework="numpy")
def attend(
    q: np.ndarray,
    kv_cache: np.ndarray,
    block_table: np.ndarray,
    token_to_request: np.ndarray,
    topk_positions: np.ndarray,
    sm_scale: float,
    dcp_rank: int,
    dcp_world: int,
    interleave: int,
    *,
    empty_lse: float = -math.inf,
    localised: bool = True,
    run: int | None = None,
    listed: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One rank's attention in float64, and what is to go wrong with it. run: the interleave by
    which keys are taken to be the rank's; listed: how much of a list counts.
    """
    T, H, _ = q.shape
    page, run = kv_cache.shape[1], run or interleave
    out, lse = np.zeros((T, H, 512), np.float32), np.full((T, H), empty_lse, np.float32)
    for t, chosen in enumerate(topk_positions[:, :listed].tolist()):
        own = [g for g in chosen if g >= 0 and g // run % dcp_world == dcp_rank]
        if not own:
            continue
        table = block_table[token_to_request[t]]
        local = [g // (run * dcp_world) * run + g % run if localised else g for g in own]
        rows = [table[k // page % len(table)] * page + k % page for k in local]
        kv = kv_cache.reshape(-1, 512)[np.array(rows) % (len(kv_cache) * page)].astype(np.float64)
        score = sm_scale * q[t].astype(np.float64) @ kv.T
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        out[t] = weight @ kv / weight.sum(axis=1, keepdims=True)
        lse[t] = score.max(axis=1) + np.log(weight.sum(axis=1))
    return out, lse


def result_of(inputs: DcpSparseInputs, function: Callable = attend, **wrong) -> DcpSparseResult:
    changed = partial(function, **wrong)
    marked = compare.candidate(framework="numpy", name="mine")(lambda **given: changed(**given))
    result = UserImplementation(marked).run(inputs)
    assert isinstance(result, DcpSparseResult)
    return result


@pytest.mark.parametrize(
    ("line", "digest"),
    [
        (DEFAULT, "dd7bf0180a1acc33"),
        (EXACT, "a1ac0253cd539abf"),
        (ONE_RANK, "8b255d4a37ca201e"),
    ],
)
def test_the_bytes_of_a_case_never_change(line: str, digest: str) -> None:
    assert inputs_of(line).sha256().startswith(digest)


@pytest.mark.parametrize("line", LINES)
def test_every_chosen_key_lies_on_one_rank_and_all_else_is_poison(line: str) -> None:
    inputs = inputs_of(line)
    assert inputs.shards is not None and inputs.case is not None
    finite = np.isfinite(inputs.kv_cache.astype(np.float32)).all(axis=2)
    pairs = {
        (int(b), g)
        for b, chosen in zip(inputs.token_to_request, inputs.topk_positions.tolist(), strict=True)
        for g in chosen
        if g >= 0
    }
    assert finite.sum() == len(pairs)
    held = 0
    for rank, shard in enumerate(inputs.shards):
        page, world, run = shard.kv_cache.shape[1], shard.dcp_world, shard.interleave
        assert (shard.dcp_rank, shard.shards, shard.case) == (rank, None, None)
        assert (shard.block_table == inputs.shards[0].block_table).all()
        own = [(b, g) for b, g in pairs if g // run % world == rank]
        for b, g in own:
            k = g // (run * world) * run + g % run
            mine = shard.kv_cache[shard.block_table[b, k // page], k % page]
            whole = inputs.kv_cache[inputs.block_table[b, g // page], g % page]
            assert (mine == whole).all()
        assert np.isfinite(shard.kv_cache.astype(np.float32)).all(axis=2).sum() == len(own)
        held += len(own)
    assert held == len(pairs)


@pytest.mark.parametrize("line", LINES)
def test_a_token_chooses_distinct_keys_that_it_sees(line: str) -> None:
    inputs = inputs_of(line)
    request, position = token_positions(inputs.case.lens, inputs.case.q)  # type: ignore[union-attr]
    assert (request == inputs.token_to_request).all()
    for seen, chosen in zip(position + 1, inputs.topk_positions.tolist(), strict=True):
        keys = [g for g in chosen if g >= 0]
        assert len(set(keys)) == len(keys) == max(0, min(seen, len(chosen)))
        assert max(keys, default=-1) < max(seen, 0) and set(chosen[len(keys) :]) <= {-1}


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (3, 4), (4, 64)])
def test_a_local_position_counts_the_rank_s_keys(world: int, interleave: int) -> None:
    positions = np.arange(-1, 700, dtype=np.int32)
    for rank in range(world):
        owned = owned_positions(700, rank, world, interleave)
        local = local_positions(positions, rank, world, interleave)
        assert local[owned + 1].tolist() == list(range(len(owned)))
        assert (np.delete(local, owned + 1) == -1).all()


@pytest.mark.parametrize("name", ["torch", "xla"])
@pytest.mark.parametrize("line", LINES)
def test_the_ranks_merged_are_the_one_call_over_all_chosen_keys(name: str, line: str) -> None:
    inputs = inputs_of(line)
    implementation = registry.find(name, "cpu")
    merged = implementation.run(inputs)
    assert isinstance(merged, DcpSparseResult) and merged.parts == "bfloat16"
    verdict = judge(inputs, merged, profile="both")
    assert (verdict.status, verdict.diagnosis) == (Status.PASS, ()), verdict.reason
    whole = implementation.run(dataclasses.replace(inputs, shards=None))
    assert isinstance(whole, DcpSparseResult)
    verdict = judge(inputs, merged, whole)
    assert verdict.status is Status.PASS and verdict.reference_failed is None
    alone = dataclasses.replace(inputs, shards=None)
    assert judge(alone, whole).status is Status.PASS


@pytest.mark.parametrize("name", ["torch", "xla"])
@pytest.mark.parametrize(
    ("words", "rows"),
    [("h=4", 0), ("lens=0,q=0", 0), ("lens=0+5,q=2+0", 32), ("lens=0+5,q=2+1,topk=1,h=2", 6)],
)
def test_batches_without_requests_tokens_or_keys_are_served(
    name: str, words: str, rows: int
) -> None:
    inputs = inputs_of(f"dcp-sparse:{words}")
    merged = registry.find(name, "cpu").run(inputs)
    assert isinstance(merged, DcpSparseResult)
    verdict = judge(inputs, merged)
    assert verdict.status is (Status.PASS if rows else Status.UNSUPPORTED), verdict.reason
    assert verdict.rows_total == rows


@pytest.mark.parametrize("line", LINES)
def test_a_right_function_of_one_rank_passes(line: str) -> None:
    inputs = inputs_of(line)
    verdict = judge(inputs, result_of(inputs))
    assert (verdict.status, verdict.diagnosis) == (Status.PASS, ()), verdict.reason
    empty = (inputs.topk_positions < 0).all(axis=1)
    assert empty.any() == (line != ONE_RANK)


@pytest.mark.parametrize("line", [DEFAULT, EXACT])
def test_an_empty_rank_whose_lse_is_0_is_named(line: str) -> None:
    inputs = inputs_of(line)
    verdict = judge(inputs, result_of(inputs, empty_lse=0.0))
    assert verdict.status is Status.SPECIAL
    assert [said.name for said in verdict.diagnosis] == ["empty-rank-lse-zero"]


def test_it_is_named_where_no_token_is_without_a_key_too() -> None:
    inputs = inputs_of("dcp-sparse:lens=9+5,q=1+2,h=4,topk=8,page=8,world=8,seed=9103")
    verdict = judge(inputs, result_of(inputs, empty_lse=0.0))
    assert verdict.status is Status.NUMERIC
    assert [said.name for said in verdict.diagnosis] == ["empty-rank-lse-zero"]


@pytest.mark.parametrize("wrong", [{"localised": False}, {"run": 1}, {"listed": 16}])
def test_keys_of_other_places_and_lists_cut_short_are_seen(wrong: dict) -> None:
    inputs = inputs_of(DEFAULT)
    assert judge(inputs, result_of(inputs, **wrong)).status in (Status.SPECIAL, Status.NUMERIC)


@pytest.mark.parametrize("line", [DEFAULT, EXACT])
def test_every_fault_can_be_planted_and_is_caught(line: str) -> None:
    inputs = inputs_of(line)
    evidence = evidence_of(inputs)
    sample = Sample(evidence=evidence, tokens=np.arange(evidence.num_tokens))
    faults = list(faults_of(evidence))
    for fault in faults:
        rows = fault.tensors(sample)
        out, lse = rows.out.astype(ml_dtypes.bfloat16), rows.lse.astype(np.float32)
        planted = side_of(inputs, DcpSparseResult(out=out, lse=lse))
        assert max(share_by_tensor(evidence, planted).values()) > 1.0, fault.label
    labels = [fault.label for fault in FAULTS]
    assert [fault.label for fault in faults] == labels and len(set(labels)) == len(labels)


def test_shards_that_lack_a_rank_are_refused() -> None:
    inputs = inputs_of(DEFAULT)
    assert inputs.shards is not None
    some = dataclasses.replace(inputs, shards=inputs.shards[1:])
    with pytest.raises(ValueError, match="shards that hold each of its keys once"):
        judge(some, result_of(inputs))


def test_a_position_past_the_block_table_is_refused() -> None:
    inputs = inputs_of(ONE_RANK)
    lists = inputs.topk_positions.copy()
    lists[0, 0] = 10_000
    with pytest.raises(ValueError, match="local key 10000 of rank 0; block_table has"):
        evidence_of(dataclasses.replace(inputs, topk_positions=lists, shards=None))


def test_parts_of_another_name_and_wrong_shapes_are_refused() -> None:
    inputs, result = inputs_of(ONE_RANK), result_of(inputs_of(ONE_RANK))
    with pytest.raises(ValueError, match="parts is 'float16'"):
        judge(inputs, dataclasses.replace(result, parts="float16"))
    assert judge(inputs, dataclasses.replace(result, lse=result.lse[:1])).status is Status.SHAPE


def test_a_function_with_a_block_table_and_chosen_positions_is_for_this_suite_alone() -> None:
    assert UserImplementation(attend).suites == {"dcp-sparse"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lens=9+1,q=1", "lens has 2 requests and q has 1"),
        ("lens=9,q=1,interleave=48", "interleave=48 doesn't divide page=64"),
        ("lens=9,q=1,rank=0", "has no key 'rank'"),
    ],
)
def test_a_wrong_line_is_refused(words: str, said: str) -> None:
    with pytest.raises(CaseError) as caught:
        parse_case(f"dcp-sparse:{words}")
    assert said in str(caught.value)
