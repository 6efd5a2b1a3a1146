"""FlashInfer's fa3 and fa2 around a fake wrapper: page lists, bases of lse, what goes flattened."""

from __future__ import annotations

import math

import pytest
import torch

from tests.torch_ref.cuda.fake_flashinfer import FA, PACKAGE
from tests.torch_ref.decode.problems import Problem, random_problem
from torch_ref import dcp_decode_oracle
from torch_ref.cuda import flashinfer_adapter as adapter
from torch_ref.cuda.decode_batch import single_tokens
from torch_ref.decode.inputs import check_decode_inputs


@pytest.fixture
def fake(hopper, install) -> None:
    install("flashinfer.mla", FA, PACKAGE)


def plan() -> dict:
    import flashinfer.mla  # type: ignore[import-not-found]

    return flashinfer.mla.plans[-1]


def run(problem: Problem, *shard: int, **options):
    return adapter.dcp_decode(check_decode_inputs(**problem.shard(*shard)), **options)


def assert_right(result, problem: Problem, *shard: int, **scales) -> None:
    want = dcp_decode_oracle(**problem.shard(*shard), **scales)
    torch.testing.assert_close(result.out.double(), want.out, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(result.lse.double(), want.lse, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["fa3", "fa2"])
@pytest.mark.parametrize(("world", "interleave", "page"), [(2, 1, 32), (4, 64, 64), (8, 4, 128)])
def test_several_ranks_are_given_single_tokens_with_pages_cut_to_their_keys(
    fake, backend, world, interleave, page
):
    problem = random_problem([301, 97, 5], [8, 1, 7], heads=3, padding=2)
    for rank in range(world):
        result, notes = run(problem, rank, world, interleave, page, backend=backend)
        assert_right(result, problem, rank, world, interleave, page)
        inputs = check_decode_inputs(**problem.shard(rank, world, interleave, page))
        assert plan()["lengths"] == list(inputs.key_counts[:16])
        assert plan()["queries"] == [1] * 16 and not plan()["causal"]
        assert plan()["backend"] == backend and plan()["heads"] == 3
    assert notes == (
        "2 padded rows kept from the kernel; their out 0 and lse -inf are the adapter's",
        "flattened to 16 rows of one query token, each with its own key count",
        "lse asked for in natural-log",
    )


def test_page_lists_hold_exactly_the_pages_of_a_rows_keys():
    shard = random_problem([130, 3], [3, 1]).shard()
    inputs = check_decode_inputs(**shard)
    indptr, indices = adapter.page_lists(single_tokens(inputs), 64)
    first, second = shard["block_table"].tolist()
    assert inputs.key_counts == (128, 129, 130, 3)
    assert indptr.tolist() == [0, 2, 5, 8, 9]
    assert indices.tolist() == [*first[:2], *first[:3], *first[:3], second[0]]


def test_rows_without_any_page_leave_one_entry_that_nobody_owns():
    inputs = check_decode_inputs(**random_problem([1], [1]).shard(1, 2))
    indptr, indices = adapter.page_lists(single_tokens(inputs), 64)
    assert indptr.tolist() == [0, 0] and indices.tolist() == [0]


def test_a_ragged_batch_of_one_rank_goes_whole(fake):
    problem = random_problem([301, 0, 97], [8, 0, 2], heads=4)
    result, notes = run(problem)
    assert_right(result, problem)
    assert plan()["queries"] == [8, 2] and plan()["lengths"] == [301, 97] and plan()["causal"]
    assert notes == ("1 requests without query tokens left out", "lse asked for in natural-log")
    flattened, _ = run(problem, flatten=True)
    assert plan()["queries"] == [1] * 10
    torch.testing.assert_close(flattened.lse, result.lse)


@pytest.mark.parametrize(
    ("totals", "heads"),
    [([30, 3], 4), ([30, 20], 6), ([30, 20], 96)],
    ids=["fewer keys than tokens", "6 heads", "96 heads"],
)
def test_where_its_causal_triangle_is_known_to_fail_a_batch_is_flattened(fake, totals, heads):
    problem = random_problem(totals, [4, 4], heads=heads)
    result, notes = run(problem)
    assert_right(result, problem)
    assert plan()["queries"] == [1] * 8 and notes[0].startswith("flattened to 8 rows")
    draft = problem.but(causal=False)
    assert_right(run(draft)[0], draft)
    assert plan()["queries"] == [4, 4] and not plan()["causal"]


@pytest.mark.parametrize("flatten", [False, True])
def test_lse_agrees_in_both_bases_and_both_layouts(fake, flatten):
    # flashinfer-ai/flashinfer#4485
    problem = random_problem([30, 20], [4, 2])
    natural, _ = run(problem, flatten=flatten)
    base2, notes = run(problem, flatten=flatten, lse_base="base2")
    assert plan()["lse_mode"] == "base2"
    assert notes[-1] == "lse asked for in base 2 and converted"
    torch.testing.assert_close(base2.lse, natural.lse, rtol=1e-6, atol=1e-6)
    assert_right(base2, problem)


def test_empty_rows_stay_minus_infinity_in_both_bases(fake):
    problem = random_problem([0, 5], [1, 1])
    for base in ("natural", "base2"):
        result, _ = run(problem, lse_base=base)
        assert (result.lse[0] == -math.inf).all() and (result.out[0] == 0).all()
    assert (run(random_problem([1], [1]), 1, 2)[0].lse == -math.inf).all()


def test_float8_keys_are_given_their_scale(fake):
    problem = random_problem([70, 9], [3, 1], dtype=torch.float8_e4m3fn)
    inputs = check_decode_inputs(**problem.shard(1, 2), kv_scale=0.5)
    result, _ = adapter.dcp_decode(inputs)
    assert_right(result, problem, 1, 2, kv_scale=0.5)
    assert plan()["scale_mode"] == "kv-per-tensor"


def test_a_prepared_call_is_planned_once(fake):
    import flashinfer.mla  # type: ignore[import-not-found]

    prepared = adapter.prepare_decode(check_decode_inputs(**random_problem([30], [2]).shard()))
    assert torch.equal(prepared.launch()[0], prepared.launch()[0])
    assert len(flashinfer.mla.plans) == 1


def test_nothing_but_padding_is_no_launch(fake):
    result, notes = run(random_problem([0], [0], padding=3))
    assert (result.out == 0).all() and (result.lse == -math.inf).all()
    assert notes[-1] == "no query token: the kernel wasn't launched"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"q_dtype": torch.float8_e4m3fn}, "q of torch.float8_e4m3fn: "),
        ({"sm_scale": 0.0}, "sm_scale = 0.0: the kernels keep the maximum of unscaled scores"),
    ],
)
def test_calls_that_it_cannot_serve_are_refused(fake, arguments, reason):
    got = adapter.unsupported_reason("fa2", **arguments)
    assert got is not None and got.startswith(reason)
    assert adapter.unsupported_reason("fa3", kv_dtype=torch.float8_e4m3fn, sm_scale=0.1) is None


def test_refusals_are_errors_of_the_call_too(fake):
    problem = random_problem([9], [1])
    with pytest.raises(ValueError, match=r"^sm_scale = 0.0"):
        run(problem.but(sm_scale=0.0))
    with pytest.raises(ValueError, match=r"^backend: 'cutlass'"):
        run(problem, backend="cutlass")
    with pytest.raises(ValueError, match=r"^lse_base: 'base10'"):
        run(problem, lse_base="base10")


@pytest.mark.parametrize(
    ("capability", "fa3", "fa2"),
    [((7, 5), False, False), ((8, 0), False, True), ((9, 0), True, True), ((10, 0), False, True)],
)
def test_each_backend_says_what_it_needs(fake, monkeypatch, capability, fa3, fa2):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    expected: dict[adapter.Backend, bool] = {"fa3": fa3, "fa2": fa2}
    for backend, serves in expected.items():
        reason = adapter.unsupported_reason(backend)
        assert (reason is None) is serves
        assert serves or f"this GPU has {capability[0]}.{capability[1]}" in str(reason)
    float8 = adapter.unsupported_reason("fa2", kv_dtype=torch.float8_e4m3fn)
    assert (float8 is None) is (capability == (9, 0))


def test_old_missing_and_broken_packages_are_said(hopper, install, monkeypatch):
    install("flashinfer.mla", "raise ImportError('libcudart.so.13')", PACKAGE)
    reason = "flashinfer.mla doesn't import (ImportError: libcudart.so.13)"
    assert adapter.unsupported_reason() == reason
    with pytest.raises(NotImplementedError, match="libcudart"):
        run(random_problem([9], [1]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert adapter.unsupported_reason() == "flashinfer isn't installed"


def test_an_old_package_is_said(hopper, install):
    install("flashinfer.mla", "class BatchMLAPagedAttentionWrapper: ...", '__version__ = "0.3.0"')
    reason = "FlashInfer 0.3.0 is too old: flashinfer.mla has no MLAPlanMetadata"
    assert adapter.unsupported_reason() == reason


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert adapter.unsupported_reason() == "FlashInfer needs a CUDA GPU and torch sees none"
