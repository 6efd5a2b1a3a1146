"""What only the GPU can show: batches too large for the interpreter, and that bits don't vary."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from tests.jax_impl.decode.batches import Batch, assert_same_bits
from tests.jax_impl.decode.reference import assert_agrees
from tests.jax_impl.decode.test_agreement import expected, flattened

pytestmark = pytest.mark.gpu

TOTAL_LENS, QUERY_LENS = [3001, 700, 64, 1, 0, 1290], [8, 3, 16, 1, 0, 1]


def batch_of(**changes: Any) -> Batch:
    return Batch(**{"total_lens": TOTAL_LENS, "query_lens": QUERY_LENS, "page_size": 64, **changes})


@pytest.mark.parametrize("heads", [6, 16, 24, 64, 96, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=str)
def test_multi_token_rows_have_the_bits_of_single_token_rows(heads, dtype):
    batch = batch_of(heads=heads, dtype=dtype, plan_options={"split_keys": 512})
    assert_same_bits(batch.run_rank("pallas"), flattened(batch).run_rank("pallas"))


@pytest.mark.parametrize("heads", [6, 16, 128])
@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (4, 4), (8, 64)])
def test_ranks_merge_to_what_one_rank_computes(heads, world, interleave):
    batch = batch_of(heads=heads, world=world, interleave=interleave, padding=5)
    assert_agrees(batch.run("pallas", out_dtype=jnp.float32), expected(batch))


def test_a_group_of_one_rank_has_the_bits_of_no_group():
    batch = batch_of(heads=128)
    without = batch.run_rank("pallas")
    for interleave in (1, 4, 64):
        one = batch.plan(dcp_rank=0, dcp_world=1, interleave=interleave)
        assert_same_bits(batch.run_rank("pallas", plan=one), without)


def test_repeats_have_the_same_bits():
    batch = batch_of(heads=128)
    first = batch.run_rank("pallas")
    for _ in range(20):
        assert_same_bits(batch.run_rank("pallas"), first)
