"""V4's CUDA kernels on a Hopper GPU, against the float64 oracle by FlashMLA's own tolerances."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch_ref.cuda.sparse_decode_cases import CASES, answer, in_two_lists, make
from tests.torch_ref.v4.problems import answer as v4_answer
from tests.torch_ref.v4.problems import v4_problem
from torch_ref.cuda import flash_mla_adapter, flash_mla_sparse_decode
from torch_ref.v4.inputs import check_v4_inputs

pytestmark = pytest.mark.gpu

# FlashMLA's tolerances are for keys of this size, at which an absolute one makes sense.
LIKE_FLASH_MLA: dict[str, Any] = {"window": 128, "page": 64, "size": 0.1}
BATCH = [0, 40, 33, 9, 300, 1030], [0, 5, 0, 9, 20, 3]


@pytest.fixture(autouse=True)
def _build() -> None:
    if reason := flash_mla_sparse_decode.unsupported_reason():
        pytest.skip(reason)


def assert_close(got: Tensor, want: Tensor, *, absolute: float, relative: float) -> None:
    """FlashMLA's rule: an element passes by its absolute or by its relative error; infinities
    must stand in the same places, and no NaN may."""
    got, want = got.double().cpu(), want.cpu()
    assert not got.isnan().any()
    assert torch.equal(got.isinf(), want.isinf()) and (got[got.isinf()] == want[got.isinf()]).all()
    got, want = got.masked_fill(got.isinf(), 0), want.masked_fill(want.isinf(), 0)
    error = (got - want).abs()
    wrong = (error >= absolute) & (error / (want.abs() + 1e-6) >= relative)
    worst = error.flatten().argmax()
    assert not wrong.any(), f"{int(wrong.sum())} elements, worst {float(error.flatten()[worst])}"


def assert_out(
    got: Tensor, want: Tensor, *, absolute: float, relative: float, cosine: float
) -> None:
    assert_close(got, want, absolute=absolute, relative=relative)
    a, r = got.double().cpu(), want.cpu()
    square = float((r * r).sum())
    if square >= 1e-12:
        assert abs(1 - 2 * float((a * r).sum()) / (float((a * a).sum()) + square)) <= cosine


def on_gpu(arguments: dict) -> dict:
    return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in arguments.items()}


@pytest.mark.parametrize("name", CASES)
def test_fp8_sparse_decode(name):
    call = CASES[name]()
    result, _ = call.on("cuda").run(flash_mla_sparse_decode)
    out, lse = answer(call)
    assert_out(result.out, out, absolute=1e-3, relative=2.01 / 128, cosine=5e-6)
    assert_close(result.lse, lse, absolute=1e-6, relative=8.01 / 65536)


def test_two_lists_share_one_softmax():
    call = make(holes=0.2, K=512)
    whole, _ = call.on("cuda").run(flash_mla_sparse_decode)
    split, _ = in_two_lists(call, 64).on("cuda").run(flash_mla_sparse_decode)
    out, lse = answer(call)
    for result in (whole, split):
        assert_out(result.out, out, absolute=1e-3, relative=2.01 / 128, cosine=5e-6)
        assert_close(result.lse, lse, absolute=1e-6, relative=8.01 / 65536)


def test_lengths_that_change_between_calls_are_planned_anew():
    for lengths in ([128, 1, 64], [1, 128, 0], [128, 128, 128]):
        call = make(T=3, lengths=lengths, extra_P=2, extra_lengths=lengths[::-1], K2=128)
        result, _ = call.on("cuda").run(flash_mla_sparse_decode)
        out, lse = answer(call)
        assert_out(result.out, out, absolute=1e-3, relative=2.01 / 128, cosine=5e-6)
        assert_close(result.lse, lse, absolute=1e-6, relative=8.01 / 65536)


def test_tokens_of_several_launches():
    T = flash_mla_sparse_decode.ROWS_PER_LAUNCH + 70
    call = make(T=T, heads=64, lengths=[t % 129 for t in range(T)], extra_P=2, holes=0.1)
    result, _ = call.on("cuda").run(flash_mla_sparse_decode)
    out, lse = answer(call)
    assert_out(result.out, out, absolute=1e-3, relative=2.01 / 128, cosine=5e-6)
    assert_close(result.lse, lse, absolute=1e-6, relative=8.01 / 65536)


def test_a_key_that_is_nan_makes_its_rows_nan():
    call = make(T=3, lengths=[4, 0, 9])
    call.main.slots[0, 2] = 0  # slot 0 is poisoned
    result, _ = call.on("cuda").run(flash_mla_sparse_decode)
    assert result.out[0].isnan().all() and result.lse[0].isnan().all()
    assert (result.lse[1] == -math.inf).all() and not result.lse[2].isnan().any()


@pytest.mark.parametrize(("ratio", "topk"), [(1, 0), (2, 200), (4, 64), (4, 512), (128, 128)])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_v4_prefill_through_fp8_sparse_decode(ratio, topk, heads):
    problem = v4_problem(*BATCH, ratio=ratio, topk=topk, heads=heads, **LIKE_FLASH_MLA)
    inputs = check_v4_inputs(**on_gpu(problem.arguments))
    result, _ = flash_mla_sparse_decode.v4_prefill(inputs)
    out, _, lse = v4_answer(problem)
    assert_out(result.out, out, absolute=1e-3, relative=2.01 / 128, cosine=5e-6)
    assert_close(result.lse, lse, absolute=1e-6, relative=8.01 / 65536)


@pytest.mark.parametrize(("ratio", "topk"), [(1, 0), (2, 200), (4, 64), (4, 512), (128, 128)])
@pytest.mark.parametrize("kv_format", ["v4-fp8", "bf16"])
def test_v4_prefill_through_sparse_prefill(ratio, topk, kv_format):
    images = [[], [(36, 39)], [], [(2, 6)], [(281, 299)], []]
    problem = v4_problem(
        *BATCH,
        ratio=ratio,
        topk=topk,
        heads=64,
        kv_format=kv_format,
        images=images,
        max_image=19,
        **LIKE_FLASH_MLA,
    )
    result, _ = flash_mla_adapter.v4_prefill(**on_gpu(problem.everything))
    assert len(result.plan) > 1
    out, max_logits, lse = v4_answer(problem)
    assert_out(result.out, out, absolute=8e-4, relative=3.01 / 128, cosine=7e-6)
    assert_close(result.lse, lse, absolute=1e-6, relative=2.01 / 65536)
    assert result.max_logits is not None
    assert_close(result.max_logits, max_logits, absolute=1e-6, relative=2.01 / 65536)


def test_the_shipped_rules_send_the_kernel_an_empty_query_and_it_fails():
    problem = v4_problem(
        [40, 40, 16, 64],
        [0, 5, 0, 3],
        chunk_size=1,
        max_model_len=64,
        max_num_batched_tokens=16,
        heads=64,
        size=0.1,
    )
    arguments = on_gpu(problem.everything)
    with pytest.raises(RuntimeError):
        flash_mla_adapter.v4_prefill(**arguments, rules="vllm-0.33.0")
    result, _ = flash_mla_adapter.v4_prefill(**arguments)
    assert_out(result.out, v4_answer(problem)[0], absolute=8e-4, relative=3.01 / 128, cosine=7e-6)
