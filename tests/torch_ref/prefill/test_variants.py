"""Each deviation of the oracle gives the wrong value that its fault is known for, and only that."""

from __future__ import annotations

import math

import pytest
import torch

from torch_ref import Variant, sparse_prefill_oracle

LOG2E = 1 / math.log(2)


def oracle(call, **deviation):
    return sparse_prefill_oracle(**call.keywords(), variant=Variant(**deviation))


def same_but(got, want, *names: str) -> None:
    """Only the named results moved."""
    for name in ("out", "max_logits", "lse", "p2"):
        equal = torch.equal(getattr(got, name), getattr(want, name))
        assert equal == (name not in names), name


def test_the_default_is_the_contract(make):
    call = make.random()
    same_but(oracle(call), sparse_prefill_oracle(**call.keywords()))


def test_sink_omitted(make):
    call = make.random()
    same_but(oracle(call, sink="omitted"), oracle(call.but(attn_sink=None)))
    same_but(oracle(call, sink="omitted"), oracle(call), "out", "p2")


def test_sink_in_lse(make):
    call = make.zero_query([0, 1]).but(attn_sink=torch.tensor([math.log(3.0)]))
    got = oracle(call, sink="in_lse")
    assert got.lse.item() == pytest.approx(math.log(5.0), rel=1e-7)  # right: ln 2
    same_but(got, oracle(call), "lse")


def test_sink_in_lse_leaves_empty_rows(make):
    call = make.zero_query([-1]).but(attn_sink=torch.tensor([2.0]))
    assert oracle(call, sink="in_lse").lse.item() == math.inf


def test_sink_times_scale(make):
    call = make.zero_query([1]).but(attn_sink=torch.tensor([4.0]), sm_scale=0.5)
    got = oracle(call, sink="times_scale")
    assert got.out[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(2.0)))  # right: exp(4)
    same_but(got, oracle(call), "out", "p2")


def test_lse_in_base_2(make):
    call = make.random()
    got, want = oracle(call, lse_base2=True), oracle(call)
    torch.testing.assert_close(got.lse, want.lse * LOG2E)
    same_but(got, want, "lse")


@pytest.mark.parametrize("scale", [0.125, 0.0, -0.125])
def test_maximum_before_scaling(make, scale):
    call = make.key_logits([32.0, 8.0, 99.0], [1.0, 2.0, 3.0]).but(sm_scale=scale)
    call = call.but(topk_length=make.int32([2]))
    got = oracle(call, max_logits="unscaled")
    assert got.max_logits.item() == 32.0
    same_but(got, oracle(call), "max_logits")


def test_scale_applied_twice(make):
    call = make.key_logits([32.0, 0.0], [1.0, 2.0]).but(sm_scale=0.125)
    got = oracle(call, scale_power=2)
    assert got.max_logits.item() == 0.5  # right: 4
    same_but(got, oracle(call.but(sm_scale=0.015625)))


def test_minus_one_wraps(make):
    call = make.zero_query([-1, 2, 5], S=5)
    got = oracle(call, index="minus_one_wraps")
    assert got.out[0, 0, 0].item() == pytest.approx(3.0)  # right: 2
    assert got.lse.item() == pytest.approx(math.log(2.0))
    far = make.zero_query([-6, 2, 5], S=5)
    same_but(oracle(far, index="minus_one_wraps"), oracle(far))


@pytest.mark.parametrize(
    ("length", "out"), [("right", 2.0), ("plus_one", 3.0), ("minus_one", 1.0), ("ignored", 4.0)]
)
def test_length_deviations(make, length, out):
    call = make.zero_query([1, 3, 5, 7]).but(topk_length=make.int32([2]))
    assert oracle(call, length=length).out[0, 0, 0].item() == pytest.approx(out)
    same_but(oracle(call.but(topk_length=None), length=length), oracle(call.but(topk_length=None)))


def test_a_length_one_short_of_one_is_an_empty_row(make):
    call = make.zero_query([1, 3]).but(topk_length=make.int32([1]))
    assert oracle(call, length="minus_one").lse.item() == math.inf


@pytest.mark.parametrize("D", [512, 576])
def test_wrong_value_columns(make, D):
    call = make.random(D=D)
    kv = torch.arange(D, dtype=torch.float32).expand(50, D).bfloat16()
    got = oracle(call.but(kv=kv, attn_sink=None), v_offset=64)
    columns = [(c + 64) % D for c in range(512)]
    torch.testing.assert_close(got.out, kv[0, columns].double().expand(3, 4, 512))
    moved = ("out",) if D == 512 else ("out", "p2")  # a rotation keeps |V_j|
    same_but(oracle(call, v_offset=64), oracle(call), *moved)


def test_rotated_heads(make):
    call = make.random()
    got, want = oracle(call, head_shift=1), oracle(call)
    for name in ("out", "max_logits", "lse", "p2"):
        assert torch.equal(getattr(got, name)[:, 1], getattr(want, name)[:, 0])
        assert torch.equal(getattr(got, name)[:, 0], getattr(want, name)[:, 3])


def test_empty_rows_as_minus_infinity(make):
    call = make.random()
    call.indices[1] = -1
    got = oracle(call, empty_lse="-inf", lse_base2=True)
    assert (got.lse[1] == -math.inf).all() and got.lse[[0, 2]].isfinite().all()
    same_but(oracle(call, empty_lse="-inf"), oracle(call), "lse")


def test_rows_can_be_chosen_under_a_deviation(make):
    call = make.random()
    kwargs = call.keywords()
    variant = Variant(max_logits="unscaled", head_shift=2)
    one = sparse_prefill_oracle(**kwargs, rows=[2], variant=variant)
    every = sparse_prefill_oracle(**kwargs, variant=variant)
    torch.testing.assert_close(one.max_logits, every.max_logits[2:])
