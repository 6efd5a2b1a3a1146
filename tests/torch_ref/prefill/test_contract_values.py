"""Cases with one right value each; beside it the wrong value that a real fault gave."""

from __future__ import annotations

import math

import pytest
import torch

INF = math.inf
LSE_TOLERANCE = 1e-6  # a few fp32 ulp at these magnitudes


def check(outputs, *, out: float, lse: float, max_logits: float | None = None) -> None:
    """out in columns 1.. (column 0 may carry the score), lse and max_logits of every row."""
    values, got_max, got_lse = outputs
    assert values[..., 1:].double().flatten().tolist() == pytest.approx(
        [out] * values[..., 1:].numel(), rel=2**-9, abs=0
    )
    assert got_lse.double().flatten().tolist() == pytest.approx(
        [lse] * got_lse.numel(), abs=LSE_TOLERANCE
    )
    if max_logits is not None:
        assert got_max.double().flatten().tolist() == pytest.approx(
            [max_logits] * got_max.numel(), abs=LSE_TOLERANCE
        )


def test_minus_one_inside_the_length_is_no_key(run, make):
    call = make.zero_query([4, 2, -1, -1, 6, -1, -1, -1], S=10)
    call.kv[-1] = 1000.0
    call = call.but(topk_length=make.int32([8]))
    check(run(call), out=4.0, lse=1.098612289)  # wrong: ~ 700 by wrapping, or lse ln 8


def test_slots_past_the_length_are_no_keys(run, make):
    call = make.zero_query([7, 3] + [0] * 126, S=10)
    call = call.but(topk_length=make.int32([2]))
    check(run(call), out=5.0, lse=0.693147181)  # wrong: 0.078125, lse ln 128 = 4.852030


def test_length_zero_is_an_empty_row(run, make):
    call = make.zero_query([7, 3] + [0] * 126, S=10).but(topk_length=make.int32([0]))
    out, max_logits, lse = run(call)
    assert not out.any() and max_logits.item() == -INF and lse.item() == INF


@pytest.mark.parametrize("width", [133, 192, 256])
def test_any_width_gives_the_same_result(run, make, width):
    call = make.zero_query(list(range(133)) + [-1] * (width - 133), S=133)
    call.kv[:] = 1.0
    check(run(call), out=1.0, lse=4.890349128)  # wrong: lse ln 192 or ln 256


@pytest.mark.parametrize("heads", [8, 16])
def test_nan_in_padded_heads_stays_there(run, make, heads):
    call = make.random(H=heads)
    plain = run(call)
    padding = 64 - heads
    padded = call.but(
        q=torch.cat([call.q, call.q.new_full((3, padding, 576), math.nan)], dim=1),
        attn_sink=torch.cat([call.attn_sink, torch.full((padding,), math.nan)]),
    )
    for got, want in zip(run(padded), plain, strict=True):
        torch.testing.assert_close(got[:, :heads], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("sink", "out"), [(200.0, 0.0), (-200.0, 6.0), (-INF, 6.0), (INF, 0.0)])
def test_a_sink_far_from_the_scores_stays_finite(run, make, sink, out):
    call = make.key_logits([-50.0], [6.0]).but(attn_sink=torch.tensor([sink]))
    values, max_logits, lse = run(call)
    assert values[..., 1:].double().flatten().tolist() == pytest.approx([out] * 511, abs=1e-100)
    assert max_logits.item() == pytest.approx(-50.0, abs=1e-5)
    assert lse.item() == pytest.approx(-50.0, abs=1e-5)


def test_a_sink_of_ln_3_takes_three_quarters(run, make):
    call = make.zero_query([0], S=1).but(attn_sink=torch.tensor([math.log(3.0)]))
    call.kv[:] = 8.0
    check(run(call), out=2.0, lse=0.0, max_logits=0.0)  # wrong: 8.0, the sink dropped


@pytest.mark.parametrize(
    ("dots", "scale", "max_logits", "lse"),
    [
        ([32.0, 32.0], 0.125, 4.0, 4.693147181),  # wrong maximum: 32 or 5.770780
        ([32.0, 32.0], 0.0, 0.0, 0.693147181),
        ([32.0, 0.0], -0.125, 0.0, 0.018149928),  # wrong maximum: -4, taken before scaling
    ],
)
def test_statistics_are_of_scaled_scores(run, make, dots, scale, max_logits, lse):
    call = make.key_logits(dots, [1.0, 1.0]).but(sm_scale=scale)
    check(run(call), out=1.0, lse=lse, max_logits=max_logits)


def test_a_negative_index_does_not_wrap(run, make):
    check(run(make.zero_query([-1, 2, 5], S=5)), out=2.0, lse=0.0)  # wrong: 3.0, row 4 mixed in


def test_each_duplicate_counts(run, make):
    check(run(make.zero_query([3, 3, 5], S=6)), out=11 / 3, lse=1.098612289)  # wrong: 4.0, ln 2


def test_lse_is_natural_log(run, make):
    check(run(make.zero_query([1] * 8, S=2)), out=1.0, lse=2.079441542)  # wrong: 3, base 2
