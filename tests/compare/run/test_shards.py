"""All ranks of a decode step run and merged: the same as one call over all keys."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from compare.houses.ranks import merge_by_jax, merge_by_torch, run_shards
from compare.run import registry
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.table import make_inputs, parse_case
from compare.user.implementation import UserImplementation

LINE = "dcp-decode:lens=37+5+2,q=3+1+2,h=3,page=32,world=4,rank=all,pad_rows=2,stale=1"


def inputs_of(line: str = LINE) -> DcpDecodeInputs:
    made = make_inputs(parse_case(line))
    assert isinstance(made, DcpDecodeInputs)
    return made


def rel_l2(out: np.ndarray, expected: np.ndarray) -> float:
    a, b = out.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", ["torch", "xla"])
def test_the_ranks_merged_are_the_call_over_all_keys(name: str) -> None:
    implementation, inputs = registry.find(name, "cpu"), inputs_of()
    merged = implementation.run(inputs)
    whole = implementation.run(dataclasses.replace(inputs, shards=None))
    assert isinstance(merged, DcpDecodeResult) and isinstance(whole, DcpDecodeResult)
    assert merged.out.dtype == whole.out.dtype == ml_dtypes.bfloat16
    assert rel_l2(merged.out, whole.out) < 3e-3
    real = np.isfinite(whole.lse)
    assert (np.isfinite(merged.lse) == real).all() and real[:6].all() and not real[6:].any()
    np.testing.assert_allclose(merged.lse[real], whole.lse[real], atol=3e-6)
    assert merged.notes == ("4 ranks merged, each rank's out in float32",)


def test_each_rank_is_one_call_and_its_own_shard() -> None:
    inputs, ranks = inputs_of(), []

    def call(shard: DcpDecodeInputs) -> DcpDecodeResult:
        ranks.append((shard.dcp_rank, shard.dcp_world, shard.shards))
        shape = shard.q.shape[:2]
        out = np.full((*shape, 512), shard.dcp_rank, ml_dtypes.bfloat16)
        return DcpDecodeResult(out=out, lse=np.zeros(shape, np.float32))

    merged = run_shards(call, inputs)
    assert ranks == [(rank, 4, None) for rank in range(4)]
    assert (merged.out == 1.5).all()
    np.testing.assert_allclose(merged.lse, np.log(4), rtol=1e-6)
    assert merged.notes == ("4 ranks merged, each rank's out in bfloat16",)


@pytest.mark.parametrize("merge", [merge_by_torch, merge_by_jax])
def test_a_rank_without_keys_has_no_weight_whatever_its_out_holds(merge) -> None:
    """vllm-project/vllm#38416: five of eight ranks hold no key of a request with three."""
    inputs = inputs_of("dcp-decode:lens=3,q=1,h=1,world=8,rank=all")

    def call(shard: DcpDecodeInputs) -> DcpDecodeResult:
        empty = shard.seq_lens[0] == 0
        out = np.full((1, 1, 512), np.nan if empty else 3 * (shard.dcp_rank + 1), np.float32)
        return DcpDecodeResult(out=out, lse=np.full((1, 1), -np.inf if empty else 0, np.float32))

    merged = run_shards(call, inputs, merge=merge)
    assert (merged.out == 6.0).all()
    np.testing.assert_allclose(merged.lse, np.log(3), rtol=1e-6)


def test_a_rank_of_another_shape_is_named() -> None:
    def call(shard: DcpDecodeInputs) -> DcpDecodeResult:
        tokens, heads = shard.q.shape[:2]
        heads -= shard.dcp_rank == 2
        out = np.zeros((tokens, heads, 512), ml_dtypes.bfloat16)
        return DcpDecodeResult(out=out, lse=np.zeros((tokens, heads), np.float32))

    with pytest.raises(ValueError, match=r"rank 2 of 4: out has shape \[8, 2, 512\]"):
        run_shards(call, inputs_of())


def test_without_shards_there_is_nothing_to_merge() -> None:
    inputs = inputs_of("dcp-decode:lens=3,q=1,h=1")
    with pytest.raises(ValueError, match="shards is empty"):
        run_shards(lambda shard: None, inputs)


def test_a_function_of_the_user_s_is_called_once_for_each_rank() -> None:
    seen = []

    def decode(q, block_table, dcp_rank, dcp_world, **_):
        seen.append((dcp_rank, dcp_world))
        rows = tuple(q.shape[:2])
        return np.zeros((*rows, 512), ml_dtypes.bfloat16), np.zeros(rows, np.float32)

    result = UserImplementation(decode, device="cpu").run(inputs_of())
    assert isinstance(result, DcpDecodeResult)
    assert seen == [(rank, 4) for rank in range(4)]
    np.testing.assert_allclose(result.lse, np.log(4), rtol=1e-6)
