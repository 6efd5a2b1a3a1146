"""The edge cases of the contract, each true for the oracle and for the eager recipe."""

from __future__ import annotations

import math

import pytest
import torch

INF, NAN = math.inf, math.nan
FILLERS = [-(2**31), -123456, -1, 50, 114514, 1919810, 2147480000, 2**31 - 1]


def close(got, want) -> None:
    """Equal but for the order of sums: bf16 outputs within one ulp, statistics within a few."""
    for name, a, b in zip(("out", "max_logits", "lse"), got, want, strict=True):
        rtol = 2**-7 if a.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(
            a,
            b,
            rtol=rtol,
            atol=1e-5,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("filler", FILLERS)
@pytest.mark.parametrize("sink", [None, 2.0, -INF, INF, NAN])
def test_a_row_without_valid_slot_is_zero_whatever_the_sink(run, make, filler, sink):
    call = make.random(S=50).but(topk_length=None)
    call.indices[1] = filler
    call = call.but(attn_sink=None if sink is None else torch.full((4,), sink))
    out, max_logits, lse = run(call)
    assert not out[1].any()
    assert (max_logits[1] == -INF).all()
    assert (lse[1] == INF).all()
    assert lse[0].isfinite().all()


def test_an_empty_row_stays_empty_with_nan_in_q(run, make):
    call = make.random()
    call.indices[1] = -1
    call.q[1] = NAN
    out, _, lse = run(call)
    assert not out[1].any() and (lse[1] == INF).all()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 130])
def test_what_lies_past_the_length_is_ignored(run, make, length):
    call = make.random(K=130, S=200)
    call = call.but(topk_length=make.int32([length] * 3))
    cut = call.indices.clone()
    cut[:, length:] = -1
    close(run(call), run(call.but(indices=cut, topk_length=None)))


def test_a_length_over_invalid_slots_only_is_an_empty_row(run, make):
    call = make.random(K=20).but(topk_length=make.int32([10] * 3))
    call.indices[:, :10] = -1
    out, max_logits, lse = run(call)
    assert not out.any() and (max_logits == -INF).all() and (lse == INF).all()


@pytest.mark.parametrize("holes", [slice(0, 64), slice(64, 128), slice(0, 200, 3)])
def test_holes_before_valid_slots_change_nothing(run, make, holes):
    call = make.random(K=200, S=300).but(topk_length=None)
    call.indices[:] = torch.arange(600, dtype=torch.int32).reshape(3, 200) % 300
    keep = torch.ones(200, dtype=torch.bool)
    keep[holes] = False
    holed = call.indices.masked_fill(~keep, -1)
    close(run(call.but(indices=holed)), run(call.but(indices=call.indices[:, keep])))


def test_an_index_repeated_d_times_has_weight_d(run, make):
    call = make.key_logits([0.0, 1.0], [1.0, 3.0]).but(indices=make.int32([[0, 0, 0, 1]]))
    out, _, lse = run(call)
    assert lse.item() == pytest.approx(math.log(3 + math.e), rel=1e-6)
    assert out[0, 0, 1].item() == pytest.approx((3 + 3 * math.e) / (3 + math.e), rel=2**-8)


@pytest.mark.parametrize("sink", [-INF, INF, 0.0, 80.0, -80.0, 1e4, NAN])
def test_a_sink_never_moves_the_statistics(run, make, sink):
    call = make.random()
    without = run(call.but(attn_sink=None))
    out, max_logits, lse = run(call.but(attn_sink=torch.full((4,), sink)))
    assert torch.equal(max_logits, without[1]) and torch.equal(lse, without[2])
    if sink == -INF:
        assert torch.equal(out, without[0])
    elif sink == INF:
        assert not out.any()
    elif math.isnan(sink):
        assert out.isnan().all()
    else:
        factor = torch.sigmoid(without[2].double() - sink)[..., None]
        torch.testing.assert_close(
            out.double(), without[0].double() * factor, rtol=2**-7, atol=1e-30
        )


@pytest.mark.parametrize(
    ("T", "S", "K"), [(1, 1, 128), (0, 8, 128), (2, 0, 16), (2, 8, 0), (1, 3, 1)]
)
def test_smallest_sizes(run, make, T, S, K):
    call = make.random(T=T, S=max(S, 1), K=max(K, 1)).but(topk_length=None)
    call = call.but(kv=call.kv[:S], indices=call.indices[:, :K])
    out, max_logits, lse = run(call)
    assert out.shape == (T, 4, 512) and max_logits.shape == lse.shape == (T, 4)
    if S == 0 or K == 0:
        assert not out.any() and (lse == INF).all()


def test_nan_outside_the_referenced_rows_never_shows(run, make):
    call = make.random(S=50)
    call.kv[30:] = NAN
    call.kv[0] = NAN  # the row that a masked index would be read from
    call.indices[:] = call.indices.clamp(1, 29)
    call.indices[:, 2:4] = make.int32([-1, 60])
    call.indices[:, 4] = 45
    call = call.but(topk_length=make.int32([4] * 3))
    for tensor in run(call):
        assert tensor.isfinite().all()


def test_nan_in_a_referenced_key_shows_in_its_token_only(run, make):
    call = make.random(D=576).but(topk_length=None)
    call.indices[:] = call.indices.clamp(0, 40)
    call.indices[1, 7] = 45
    call.kv[45, 575] = NAN  # the last rope column: in the score, not in V
    out, _, lse = run(call)
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert out[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()


def test_nan_in_q_shows_in_its_head_only(run, make):
    call = make.random()
    call.q[2, 1, 5] = NAN
    out, _, lse = run(call)
    hit = torch.zeros(3, 4, dtype=torch.bool)
    hit[2, 1] = True
    assert torch.equal(lse.isnan(), hit)
    assert torch.equal(out.isnan().all(-1), hit) and torch.equal(out.isnan().any(-1), hit)


def test_maximum_is_over_the_scores_that_are_numbers(run, make):
    call = make.key_logits([1.0, NAN, 3.0], [1.0, 1.0, 1.0])
    _, max_logits, lse = run(call)
    assert max_logits.item() == pytest.approx(3.0) and lse.isnan().all()


def test_order_of_slots_does_not_matter(run, make):
    call = make.random(K=64).but(topk_length=None)
    shuffled = call.indices[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    close(run(call.but(indices=shuffled)), run(call))


def test_strided_inputs_are_read_in_place(run, make):
    call = make.random()
    q = torch.full((3, 9, 600), NAN, dtype=torch.bfloat16)[:, 1::2, 8:584]
    kv = torch.full((100, 600), NAN, dtype=torch.bfloat16)[::2, :576]
    indices = torch.zeros(3, 80, dtype=torch.int32)[:, ::2]
    strided = call.but(q=q.copy_(call.q), kv=kv.copy_(call.kv), indices=indices.copy_(call.indices))
    for got, want in zip(run(strided), run(call), strict=True):
        assert torch.equal(got, want)


def test_unit_axes_of_kv_and_indices_are_optional(run, make):
    call = make.random()
    with_axes = call.but(kv=call.kv[:, None], indices=call.indices[:, None])
    for got, want in zip(run(with_axes), run(call), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_scores_give_one_hot_weights(run, make, scale):
    call = make.key_logits([1.0, -1.0, 0.5], [2.0, 4.0, 8.0]).but(sm_scale=scale)
    out, max_logits, lse = run(call)
    assert (out[..., 1:] == (2.0 if scale > 0 else 4.0)).all()
    assert max_logits.item() == pytest.approx(1e4) and lse.item() == pytest.approx(1e4)


def test_rope_columns_count_in_scores_and_not_in_values(run, make):
    call = make.zero_query([0, 1], S=2)
    kv = torch.zeros(2, 576, dtype=torch.bfloat16)
    kv[1, :512], kv[1, 575] = 4.0, 1.0
    q = torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    q[..., 575] = 1.0
    out, _, lse = run(call.but(q=q, kv=kv, sm_scale=math.log(3.0)))
    assert lse.item() == pytest.approx(math.log(4.0), rel=1e-6)
    assert out.shape == (1, 1, 512) and out.double().flatten().tolist() == pytest.approx(
        [3.0] * 512, rel=2**-8
    )
