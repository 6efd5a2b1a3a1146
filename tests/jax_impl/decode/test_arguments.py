"""What decode and its planner accept, and what they say about the rest."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import DecodeCapacity, dcp_decode, plan_decode, unsupported_reason
from tests.jax_impl.decode.batches import Batch, assert_same_bits

BATCH = Batch(total_lens=[70, 20], query_lens=[2, 1], heads=2)
CACHE, TABLE = BATCH.cache()


def zeros(*shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
    return np.zeros(shape, dtype)


def call(**changes: Any):
    arguments: dict[str, Any] = {
        "q": BATCH.q, "kv_cache": CACHE, "block_table": TABLE, "plan": BATCH.plan(),
        "sm_scale": 0.1, "backend": "xla",
    }  # fmt: skip
    return dcp_decode(**(arguments | changes))


def table_with(row: int, column: int, page: int) -> np.ndarray:
    table = TABLE.copy()
    table[row, column] = page
    return table


BAD = [
    # (changed argument, its value, error, what the message says)
    ("q", zeros(3, 2, 512), NotImplementedError, r"q must have a width of 576 .*got 512"),
    ("q", zeros(3, 2 * 576), ValueError, r"q must be \[T, H, 576\]; got shape \[3, 1152\]"),
    ("q", zeros(3, 2, 576, dtype=np.float32), ValueError, "q must be bfloat16 or .*; got float32"),
    ("q", zeros(3, 4, 576), ValueError, "q must have the 2 heads of its plan; got 4"),
    ("q", zeros(2, 2, 576), ValueError, "q must have a row for each of the plan's 3; got 2"),
    ("q", zeros(3, 2, 576, dtype=jnp.float8_e4m3fn), NotImplementedError, "got float8_e4m3fn"),
    ("kv_cache", zeros(9, 48, 576), NotImplementedError, "pages of 32, 64 or 128; got 48"),
    ("kv_cache", zeros(9, 16, 576), NotImplementedError, "pages of 32, 64 or 128; got 16"),
    ("kv_cache", zeros(9, 96, 576), NotImplementedError, "pages of 32, 64 or 128; got 96"),
    ("kv_cache", zeros(9, 1, 576), NotImplementedError, "pages of 32, 64 or 128; got 1"),
    ("kv_cache", zeros(9, 32, 640), NotImplementedError, "kv_cache must have a width of 576"),
    ("kv_cache", zeros(9, 32, 576, dtype=np.float16), ValueError, "kv_cache must be .*got float16"),
    ("block_table", TABLE.astype(np.int64), ValueError, "block_table must be int32; got int64"),
    ("block_table", TABLE[:1], ValueError, "each of the plan's 2 requests; got 1"),
    ("block_table", TABLE[0], ValueError, r"block_table must be \[B, max_pages\]; got shape"),
    ("block_table", TABLE[:, :2], ValueError, "70 keys of request 0, 3 pages of 32; got 2"),
    ("block_table", table_with(0, 2, -1), ValueError, "0 to 24, .*got -1 for page 2 of request 0"),
    ("block_table", table_with(1, 0, 25), ValueError, "0 to 24, .*got 25 for page 0 of request 1"),
    ("plan", {}, ValueError, "plan must be a DecodePlan of plan_decode; got dict"),
    ("plan", BATCH.plan(interleave=64, dcp_world=2), ValueError, "32 with interleave 64"),
    ("sm_scale", float("nan"), ValueError, "sm_scale must be finite"),
    ("sm_scale", jnp.float32(1), ValueError, "sm_scale must be a Python or NumPy number"),
    ("kv_scale", 0.0, ValueError, "kv_scale must be positive; got 0.0"),
    ("kv_scale", np.ones(2, np.float32), ValueError, r"one float32; got float32 \[2\]"),
    ("kv_scale", 1e-50, ValueError, "a positive float32, 1.1754944e-38 at least.*; got 1e-50"),
    ("kv_scale", np.float32([1e-40]), ValueError, "kv_scale must be a positive float32, 1.17549"),
    ("q_scale", 1e-39, ValueError, "q_scale must be a positive float32, 1.1754944e-38 at least"),
    ("sm_scale", -1e-40, ValueError, r"q_scale \* kv_scale must be 0 or.*; got -1e-40"),
    ("q_scale", -1, ValueError, "q_scale must be positive; got -1"),
    ("out_dtype", np.float16, NotImplementedError, "bfloat16 or float32; got float16"),
    ("backend", "triton", ValueError, "backend must be one of auto, xla, pallas, pallas-interpret"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_a_bad_argument_is_refused_by_name(name, value, error, message):
    with pytest.raises(error, match=message):
        call(**{name: value})


@pytest.mark.parametrize(
    ("sm_scale", "kv_scale", "product"), [(1e30, 1e30, r"1e\+60"), (-1e-30, 1e-30, "-1e-60")]
)
def test_scales_whose_product_is_no_float32_are_refused(sm_scale, kv_scale, product):
    message = rf"^sm_scale \* q_scale \* kv_scale must be 0 or, as a float32, .*; got {product} "
    with pytest.raises(ValueError, match=message):
        call(sm_scale=sm_scale, kv_scale=np.float32([kv_scale]))


def test_pallas_needs_a_hopper_gpu():
    if unsupported_reason("pallas") is None:
        pytest.skip("this machine has one")
    with pytest.raises(
        NotImplementedError, match="backend='pallas': pallas needs an NVIDIA Hopper"
    ):
        call(backend="pallas")


@pytest.mark.parametrize(
    ("cache", "table"),
    [(zeros(0, 32, 576), zeros(2, 3, dtype=np.int32)), (CACHE, zeros(2, 0, dtype=np.int32))],
    ids=["no pages", "no columns"],
)
def test_an_empty_cache_or_table_serves_requests_without_keys(backend, cache, table):
    plan = plan_decode([0, 2, 3], [0, 0], [5, 3], max_query_len=2, heads=2)
    result = call(kv_cache=cache, block_table=table, plan=plan, backend=backend)
    assert not np.asarray(result.out, np.float32).any()
    np.testing.assert_array_equal(result.lse, -np.inf)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_tokens_is_padding_alone(rows):
    plan = plan_decode([0, 0, 0], [70, 20], [70, 20], max_query_len=2, heads=2)
    result = call(q=BATCH.q[:rows], plan=plan)
    assert result.out.shape == (rows, 2, 512) and result.lse.shape == (rows, 2)
    assert not np.asarray(result.out, np.float32).any()
    assert (np.asarray(result.lse) == -np.inf).all()


def test_torch_tensors_are_taken():
    import torch

    arrays = (a.copy().view(np.int16) for a in (BATCH.q, CACHE))
    q, cache = (torch.from_numpy(a).view(torch.bfloat16) for a in arrays)
    result = call(q=q, kv_cache=cache, block_table=torch.from_numpy(TABLE))
    q.zero_()  # whose memory it is; the call has read it
    cache.zero_()
    assert_same_bits(result, call())


GOOD: dict[str, Any] = dict(
    query_start_loc=[0, 2, 3], seq_lens=[70, 20], total_lens=[70, 20], max_query_len=2, heads=2
)

BAD_PLANS: list[tuple[str, Any, str]] = [
    ("total_lens", [70], "total_lens: 1 entries; accepted: one per request of query_start_loc, 2"),
    ("seq_lens", [70, 20, 1], "seq_lens: 3 entries; accepted: one per request"),
    ("total_lens", [70.0, 20.0], "total_lens[0]: 70.0; accepted: one integer >= 0 per request"),
    ("seq_lens", [70, -1], "seq_lens[1]: -1; accepted"),
    ("query_start_loc", [1, 2, 3], "query_start_loc: starts with 1; accepted: offsets from 0"),
    ("query_start_loc", [], "query_start_loc: starts with nothing"),
    ("query_start_loc", [0, 3, 2], "query_start_loc[2]: 2 after 3; accepted: offsets that never"),
    ("max_query_len", 1, "max_query_len: 1, but request 0 of query_start_loc has 2 query tokens"),
    ("max_query_len", 0, "max_query_len: 0; accepted: an integer >= 1"),
    ("heads", 0, "heads: 0; accepted: an integer >= 1"),
    ("dcp_rank", 2, "dcp_rank: 2 in a world of 1; accepted: 0 to 0"),
    ("dcp_rank", -1, "dcp_rank: -1; accepted: an integer >= 0"),
    ("dcp_world", 0, "dcp_world: 0; accepted: an integer >= 1"),
    ("interleave", 0, "interleave: 0; accepted: an integer >= 1"),
    ("causal", 1, "causal: 1; accepted: True or False"),
    ("capacity", DecodeCapacity(tokens=2, requests=2), "capacity: 2 tokens, 2 requests; accepted"),
    ("capacity", 5, "capacity: 5; accepted: a DecodeCapacity, or None"),
    ("capacity", {}, "capacity: {}; accepted: a DecodeCapacity, or None"),
    ("total_lens", [2**63, 20], f"total_lens[0]: {2**63}; accepted: integers from 0 to"),
    ("seq_lens", [70, 2**64], f"seq_lens[1]: {2**64}; accepted: integers from 0 to"),
    ("interleave", 2**62, f"interleave: {2**62}; accepted: an integer from 1 to 2147483647"),
    (
        "capacity",
        DecodeCapacity(tokens=2**28, requests=2),
        f"capacity: {2**28} tokens of 8 rows each; accepted: at most 2147483647 rows",
    ),
    ("split_keys", 64, "split_keys: 64; accepted: a multiple of 128, or None"),
]


def test_a_row_sees_as_many_keys_as_an_int32_holds():
    most = 2**31 - 1
    lengths = GOOD | {"seq_lens": [70, most], "total_lens": [70, most]}
    assert plan_decode(**lengths).row_keys.tolist() == [69, 70, most]
    # More may be held if no row sees it.
    assert plan_decode(**GOOD | {"seq_lens": [70, 2**40]}).row_keys.tolist() == [69, 70, 20]
    message = f"seq_lens[1]: {2**40}, of which a row sees {2**31}; accepted: rows that see at most"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan_decode(**GOOD | {"seq_lens": [70, 2**40], "total_lens": [70, 2**31]})
    with pytest.raises(ValueError, match=f"^capacity.tokens: {2**31}; accepted: an integer from 0"):
        DecodeCapacity(tokens=2**31, requests=1)


@pytest.mark.parametrize(("name", "value", "message"), BAD_PLANS)
def test_a_plan_that_cannot_be_made_is_refused_by_name(name, value, message):
    arguments: dict[str, Any] = GOOD | {name: value}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan_decode(**arguments)


def test_what_is_not_built_is_said():
    with pytest.raises(NotImplementedError, match="heads: 129; accepted: 1 to 128"):
        plan_decode(**(GOOD | {"heads": 129}))
    capacity = DecodeCapacity(tokens=3, requests=2)
    with pytest.raises(NotImplementedError, match="split_keys: 128 with a capacity"):
        plan_decode(**GOOD, capacity=capacity, split_keys=128)
    with pytest.raises(ValueError, match="cluster: 3; accepted: 1, 2 or None"):
        DecodeCapacity(tokens=1, requests=1, cluster=3)
