"""What decode refuses, by name, before it computes anything."""

from __future__ import annotations

import pytest
import torch

from tests.torch_ref.decode.problems import int32, random_problem
from torch_ref import dcp_decode, dcp_decode_oracle

BF16 = torch.bfloat16


@pytest.mark.parametrize("function", [dcp_decode_oracle, dcp_decode])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 2, 576)}, "q: dtype torch.float32; accepted is torch.bfloat16 or"),
        ({"q": torch.zeros(3, 2, 512, dtype=BF16)}, r"q: shape \[3, 2, 512\]"),
        ({"q": torch.zeros(3, 129, 576, dtype=BF16)}, "q: 129 heads; accepted are 1 to 128"),
        ({"q": torch.zeros(3, 0, 576, dtype=BF16)}, "q: 0 heads"),
        ({"q": torch.zeros(2, 2, 576, dtype=BF16)}, "q: 2 rows; query_start_loc counts 3"),
        ({"kv_cache": torch.zeros(3, 64, 576)}, "kv_cache: dtype torch.float32"),
        ({"kv_cache": torch.zeros(3, 576, dtype=BF16)}, r"kv_cache: shape \[3, 576\]"),
        ({"kv_cache": torch.zeros(3, 0, 576, dtype=BF16)}, r"kv_cache: shape \[3, 0, 576\]"),
        ({"block_table": torch.zeros(2, 2)}, "block_table: dtype torch.float32"),
        ({"block_table": int32([[0, 1]])}, r"block_table: shape \[1, 2\]; accepted is \[2, width"),
        (
            {"block_table": int32([[0], [1]])},
            "block_table: width 1; request 0 has 70 keys, which lie on 2 pages of 64",
        ),
        (
            {"block_table": int32([[0, 4], [1, 0]])},
            "block_table: page 4 at column 1 of request 0, within its 70 keys; accepted are pages",
        ),
        ({"block_table": int32([[0, -1], [1, 0]])}, "block_table: page -1 at column 1"),
        ({"seq_lens": int32([70])}, r"seq_lens: shape \[1\]; query_start_loc has 2 requests"),
        ({"seq_lens": torch.tensor([70, 9])}, "seq_lens: dtype torch.int64"),
        ({"seq_lens": int32([70, -9])}, "seq_lens: -9 for request 1"),
        ({"total_lens": int32([70, 9, 9])}, r"total_lens: shape \[3\]; query_start_loc has 2"),
        ({"total_lens": int32([70, -1])}, "total_lens: -1 for request 1"),
        ({"query_start_loc": int32([0, 2])}, "seq_lens: shape"),
        ({"query_start_loc": int32([1, 2, 3])}, "query_start_loc: starts with 1"),
        ({"query_start_loc": int32([0, 3, 2])}, "query_start_loc: falls from 3 to 2"),
        ({"query_start_loc": int32([])}, r"query_start_loc: shape \[0\]"),
        ({"sm_scale": float("nan")}, "sm_scale: nan"),
        ({"sm_scale": float("inf")}, "sm_scale: inf"),
        ({"sm_scale": "1"}, "sm_scale: '1'"),
        ({"dcp_rank": 1}, "dcp_rank: 1; accepted are 0 to 0 with dcp_world = 1"),
        ({"dcp_world": 0}, "dcp_world: 0"),
        ({"interleave": 3}, "interleave: 3 with pages of 64 keys"),
        ({"interleave": 128}, "interleave: 128 with pages of 64 keys"),
        ({"causal": 1}, "causal: 1; accepted are True and False"),
        ({"kv_scale": 0.5}, "kv_scale: 0.5 with a bf16 kv_cache"),
        ({"q_scale": 2.0}, "q_scale: 2.0 with a bf16 q"),
        ({"kv_scale": 0.0}, "kv_scale: 0.0; accepted is a positive number"),
        ({"kv_scale": float("inf")}, "kv_scale: inf"),
        ({"kv_scale": torch.ones(2)}, r"kv_scale: shape \[2\]; accepted is one number"),
    ],
)
def test_bad_arguments_are_named(function, changes, message):
    arguments = random_problem([70, 9], [2, 1]).shard()
    arguments["block_table"] = int32([[0, 1], [2, -7]])
    function(**arguments)
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**(arguments | changes))


def test_a_table_as_wide_as_the_whole_context_over_the_world_is_enough():
    # vllm-project/vllm#50825: 1000 keys on pages of 64, two ranks: 8 columns, not 16
    arguments = random_problem([1000], [1]).shard(0, 2)
    arguments["block_table"] = arguments["block_table"][:, :8].contiguous()
    dcp_decode(**arguments)
    arguments["block_table"] = arguments["block_table"][:, :7].contiguous()
    with pytest.raises(ValueError, match=r"^block_table: width 7; request 0 has 500 keys"):
        dcp_decode(**arguments)


def test_idle_requests_may_hold_any_table():
    arguments = random_problem([70, 9], [2, 0]).shard()
    want = dcp_decode(**arguments)
    arguments["block_table"][1] = -7
    assert torch.equal(dcp_decode(**arguments).out, want.out)


def test_unknown_output_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"^out_dtype: torch.float64"):
        dcp_decode(**random_problem([9], [1]).shard(), out_dtype=torch.float64)
