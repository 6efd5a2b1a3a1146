"""FlashInfer's native DCP decode around a fake function that masks by global position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.torch_ref.cuda.fake_flashinfer import DCP, PACKAGE
from tests.torch_ref.decode.problems import Problem, random_problem
from torch_ref import dcp_decode_oracle
from torch_ref.cuda import flashinfer_cute_dsl as adapter
from torch_ref.decode.inputs import check_decode_inputs


@pytest.fixture
def fake(blackwell, install) -> None:
    install("flashinfer.mla", DCP, PACKAGE)


def calls() -> list[dict]:
    import flashinfer.mla  # type: ignore[import-not-found]

    return flashinfer.mla.calls


def run(problem: Problem, *shard: int):
    return adapter.dcp_decode(check_decode_inputs(**problem.shard(*shard)))


def assert_right(result, problem: Problem, *shard: int, **scales) -> None:
    want = dcp_decode_oracle(**problem.shard(*shard), **scales)
    torch.testing.assert_close(result.out.double(), want.out, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(result.lse.double(), want.lse, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_ragged_batch_goes_whole_with_one_bound_a_request(fake, world):
    problem = random_problem([301, 97, 0, 5], [8, 1, 0, 7], heads=3, padding=2)
    for rank in range(world):
        result, notes = run(problem, rank, world)
        assert_right(result, problem, rank, world)
        sent = calls()[-1]
        assert sent["query"].shape == (16, 3, 576)
        assert sent["starts"].tolist() == [0, 8, 9, 16] and sent["max_q_len"] == 8
        assert sent["bounds"].tolist() == [301, 97, 5]
    assert notes[1:3] == (
        "1 requests without query tokens left out",
        "block-table entries past the lengths replaced by page 0",
    )
    assert notes[-1] == "query layout compact, lse in natural-log by default"


def test_a_uniform_batch_goes_in_the_dense_layout(fake):
    problem = random_problem([64, 130], [4, 4])
    result, notes = run(problem, 1, 2)
    assert_right(result, problem, 1, 2)
    assert calls()[-1]["query"].shape == (2, 4, 2, 576) and calls()[-1]["starts"] is None
    assert notes[-1] == "query layout dense, lse in natural-log by default"


def test_a_draft_block_goes_as_single_tokens_bounded_at_the_total(fake):
    problem = random_problem([30, 40], [3, 1]).but(causal=False)
    result, _ = run(problem, 1, 2)
    assert_right(result, problem, 1, 2)
    assert calls()[-1]["bounds"].tolist() == [30, 30, 30, 40]


@pytest.mark.parametrize(("page", "width"), [(32, 8), (64, 6), (128, 6)])
def test_block_tables_are_padded_to_whole_tiles(fake, page, width):
    problem = random_problem([{32: 150, 64: 300, 128: 600}[page]], [2])
    inputs = check_decode_inputs(**problem.shard(0, 1, 1, page))
    assert inputs.block_table.shape[1] == 6  # five pages and a stale entry
    result, notes = adapter.dcp_decode(inputs)
    assert_right(result, problem, 0, 1, 1, page)
    assert calls()[-1]["block_tables"].shape == (1, width)
    padded = "block table padded from 6 to 8 columns (page 0)" in notes
    assert padded is (page == 32)


def test_fewer_keys_than_tokens_and_empty_ranks(fake):
    problem = random_problem([1, 3], [4, 4])
    for rank in range(8):
        result, _ = run(problem, rank, 8)
        assert_right(result, problem, rank, 8)
    assert (result.lse == -math.inf).all()


def test_float8_scales_join_the_products(fake):
    problem = random_problem([70, 9], [3, 1], dtype=torch.float8_e4m3fn)
    problem = problem.but(q=problem.q.to(torch.float8_e4m3fn))
    scales: dict[str, Any] = {"kv_scale": 0.5, "q_scale": 2.0}
    result, _ = adapter.dcp_decode(check_decode_inputs(**problem.shard(1, 2), **scales))
    assert_right(result, problem, 1, 2, **scales)


def test_nothing_but_padding_is_no_launch(fake):
    result, _ = run(random_problem([0], [0], padding=3))
    assert (result.lse == -math.inf).all() and calls() == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"interleave": 4, "dcp_world": 2}, "interleave = 4: FlashInfer's DCP kernel deals keys"),
        ({"page_size": 1}, "page_size = 1: accepted are 2, 4"),
        ({"page_size": 48}, "page_size = 48"),
        (
            {"q_dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
            "q of torch.bfloat16 with keys of torch.float8_e4m3fn",
        ),
        ({"sm_scale": -1.0}, "sm_scale = -1.0"),
    ],
)
def test_calls_that_it_cannot_serve_are_refused(fake, arguments, reason):
    got = adapter.unsupported_reason(**arguments)
    assert got is not None and got.startswith(reason)
    served = {"page_size": 64, "dcp_world": 1, "interleave": 4, "sm_scale": 0.1}
    assert adapter.unsupported_reason(**served) is None
    with pytest.raises(ValueError, match=r"^interleave = 4"):
        run(random_problem([30], [2]), 0, 2, 4)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_other_architectures_are_said(fake, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    reason = adapter.unsupported_reason()
    assert reason is not None and "tcgen05" in reason
    assert reason.endswith(f"this GPU has {capability[0]}.{capability[1]}")
    with pytest.raises(NotImplementedError, match="tcgen05"):
        run(random_problem([30], [2]))


def test_a_version_without_dcp_is_said(blackwell, install):
    source = "def trtllm_batch_decode_with_kv_cache_mla(query, kv_cache, cum_seq_lens_q=None): ..."
    install("flashinfer.mla", source, PACKAGE)
    reason = adapter.unsupported_reason()
    assert reason is not None and "takes no enable_dcp, no cp_world" in reason
