"""Merging partial attention: identity, order, empty and poisoned states, the base of lse."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from torch_ref import DecodeOracleResult, merge_oracle, merge_states, natural_lse

INF = math.inf


def state(value: float, lse: float, dtype: torch.dtype = torch.float32):
    """One row and head whose out is `value` everywhere."""
    return torch.full((1, 1, 4), value, dtype=dtype), torch.tensor([[lse]], dtype=dtype)


def merged(*states, **options) -> tuple[float, float]:
    outs, lses = zip(*(state(*s) for s in states), strict=True)
    result = merge_states(outs, lses, **options)
    assert result.out.dtype == result.lse.dtype == torch.float32
    assert (result.out == result.out[0, 0, 0]).all() or result.out.isnan().all()
    return result.out[0, 0, 0].item(), result.lse.item()


@pytest.mark.parametrize("empty", [-INF, INF])
def test_an_empty_state_counts_for_nothing(empty):
    # deepseek-ai/FlashMLA#77: A (out 0, lse +inf), B (out 5, lse 1.25)
    for order in itertools.permutations([(0.0, empty), (5.0, 1.25)]):
        assert merged(*order) == (5.0, 1.25)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_only_empty_states_merge_to_an_empty_one(count):
    # flashinfer-ai/flashinfer#4051
    empty = [(0.0, -INF)] * count
    assert merged(*empty) == (0.0, -INF)
    for order in set(itertools.permutations([merged(*empty), (7.0, 0.5)])):
        assert merged(*order) == (7.0, 0.5)


def test_ranks_without_keys_have_no_share():
    # vllm-project/vllm#38416: wrong 2.25 with lse 0 and out 0 from five empty ranks
    ranks = [(3.0, 0.0), (6.0, 0.0), (9.0, 0.0)] + [(math.nan, -INF)] * 5
    out, lse = merged(*ranks)
    assert out == pytest.approx(6.0, abs=1e-6)
    assert lse == pytest.approx(1.098612, abs=1e-6)
    wrong, _ = merged(*ranks[:3], *[(0.0, 0.0)] * 5)
    assert wrong == pytest.approx(2.25)


def test_bases_are_converted_where_they_are_declared():
    # vllm-project/vllm#47079: 8 keys of value 1, one of value 10
    natural, base2 = [(1.0, math.log(8.0)), (10.0, 0.0)], [(1.0, 3.0), (10.0, 0.0)]
    for states, bases in ((natural, "natural"), (base2, "base2"), (base2, ["base2", "base2"])):
        out, lse = merged(*states, bases=bases)
        assert out == pytest.approx(2.0, abs=1e-6)
        assert lse == pytest.approx(2.197225, abs=1e-6)
    assert merged(*base2)[0] == pytest.approx(1.426833, abs=1e-6)  # undeclared: wrong


def test_mixed_bases_are_refused():
    outs, lses = zip(state(1.0, 3.0), state(10.0, 0.0), strict=True)
    with pytest.raises(ValueError, match=r"^bases: mixed \(natural, base2\); .*natural_lse first"):
        merge_states(outs, lses, bases=["natural", "base2"])


def test_large_lses_do_not_overflow():
    # NVIDIA/cutlass#2274: 300 and 298; exp(300) is infinite in fp32
    out, lse = merged((1.0, 300.0), (0.0, 298.0))
    assert out == pytest.approx(0.880797, abs=1e-6)
    assert lse == pytest.approx(300.126928, abs=1e-4)
    assert merged((1.0, -300.0), (0.0, -302.0))[1] == pytest.approx(-299.873072, abs=1e-4)


def test_a_poisoned_state_poisons_its_row():
    assert all(math.isnan(x) for x in merged((1.0, 0.0), (2.0, math.nan)))
    assert all(math.isnan(x) for x in merged((1.0, -INF), (2.0, math.nan)))
    with pytest.raises(ValueError, match=r"^lses: NaN in state 1 at row 0, head 0"):
        merged((1.0, 0.0), (2.0, math.nan), raise_on_nan=True)


def test_a_poisoned_row_leaves_others_alone():
    lses = [torch.tensor([[0.0], [0.0]]), torch.tensor([[math.nan], [0.0]])]
    result = merge_states([torch.ones(2, 1, 3), torch.zeros(2, 1, 3)], lses)
    assert result.lse.isnan().tolist() == [[True], [False]]
    assert result.out[1].tolist() == [[0.5] * 3] and result.out[0].isnan().all()


def test_a_nan_out_with_weight_is_not_hidden():
    assert math.isnan(merged((1.0, 0.0), (math.nan, 0.0))[0])


def test_stacked_and_bf16_states_are_taken_and_fp64_ones_kept():
    outs, lses = torch.ones(3, 2, 5, 8).bfloat16(), torch.zeros(3, 2, 5)
    result = merge_states(outs, lses)
    assert result.out.shape == (2, 5, 8) and result.out.dtype == torch.float32
    wide = merge_states(outs.double(), lses.double())
    assert wide.out.dtype == wide.lse.dtype == torch.float64


def test_the_oracles_merge_adds_the_size_of_rounding_in_squares():
    parts = [
        DecodeOracleResult(*state(1.0, math.log(3.0), torch.float64), torch.tensor([[0.4]])),
        DecodeOracleResult(*state(9.0, 0.0, torch.float64), torch.tensor([[0.8]])),
        DecodeOracleResult(*state(math.nan, -INF, torch.float64), torch.tensor([[0.0]])),
    ]
    result = merge_oracle(parts)
    assert result.out[0, 0].tolist() == pytest.approx([3.0] * 4, rel=1e-15)
    assert result.lse.item() == pytest.approx(math.log(4.0), rel=1e-15)
    assert result.p2.item() == pytest.approx(math.hypot(0.75 * 0.4, 0.25 * 0.8), rel=1e-7)


def test_natural_lse_reads_only_the_declared_empty_value():
    lse = torch.tensor([3.0, INF, -INF])
    assert natural_lse(lse, "base2").tolist() == pytest.approx([2.0794415, INF, -INF])
    assert natural_lse(lse, "natural", empty="+inf").tolist() == [3.0, -INF, -INF]
    with pytest.raises(ValueError, match=r"^empty: 'zero'"):
        natural_lse(lse, "natural", empty="zero")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outs", "lses", "options", "message"),
    [
        ([], [], {}, "outs: 0 states; lses has 0"),
        ([torch.ones(1, 1, 2)], [], {}, "outs: 1 states; lses has 0"),
        ([torch.ones(1, 2)], [torch.ones(1, 2)], {}, r"outs: shape \[1, 2\] of state 0"),
        (
            [torch.ones(1, 1, 2), torch.ones(2, 1, 2)],
            [torch.ones(1, 1), torch.ones(2, 1)],
            {},
            r"outs: shape \[2, 1, 2\] of state 1",
        ),
        ([torch.ones(1, 3, 2)], [torch.ones(3, 1)], {}, r"lses: shape \[3, 1\] of state 0"),
        ([torch.ones(1, 1, 2)], [torch.ones(1, 1)], {"bases": "base10"}, "bases: 'base10'"),
        (
            [torch.ones(1, 1, 2)],
            [torch.ones(1, 1)],
            {"bases": ["base2", "base2"]},
            "bases: 2 words",
        ),
    ],
)
def test_states_that_do_not_fit_are_named(outs, lses, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        merge_states(outs, lses, **options)
