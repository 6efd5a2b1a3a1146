"""Merges the partial attention of several ranks.

Each state is a softmax over its own keys: out and lse. With m the largest lse and

    Z = sum_r exp(lse_r - m)     out = sum_r exp(lse_r - m) / Z * out_r     lse = m + ln Z

the result is the softmax over all of the keys, in whatever order and number the states come. A
state whose lse is -inf holds no key; +inf, which FlashMLA writes for that, is read the same way.
Its weight is exactly 0 and its out is left out, whatever lies there. Without any key out is 0 and
lse -inf: the merge's identity. A NaN lse says that the state is poisoned: the row becomes NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from torch_ref.arguments import shape_of
from torch_ref.arithmetic import LN2
from torch_ref.decode import DecodeOracleResult, DecodeResult

LseBase = Literal["natural", "base2"]


def natural_lse(
    lse: Float[Tensor, "..."], base: LseBase, *, empty: Literal["-inf", "+inf"] = "-inf"
) -> Float[Tensor, "..."]:
    """Converts lse of a declared base and empty value to natural-log, -inf for empty rows.

    The declared empty value alone is taken for empty; the other infinity stays, to be reported.
    """
    _check_base(base)
    if empty not in ("-inf", "+inf"):
        raise ValueError(f"empty: {empty!r}; accepted are '-inf' and '+inf'")
    if empty == "+inf":
        lse = lse.masked_fill(lse == math.inf, -math.inf)
    return lse * LN2 if base == "base2" else lse


def merge_states(
    outs: Sequence[Float[Tensor, "R H Dv"]] | Float[Tensor, "N R H Dv"],
    lses: Sequence[Float[Tensor, "R H"]] | Float[Tensor, "N R H"],
    *,
    bases: LseBase | Sequence[LseBase] = "natural",
    raise_on_nan: bool = False,
) -> DecodeResult:
    """Merges the states' out and lse into those of one softmax, computed and returned in fp32.

    outs N of [R, H, Dv] and lses N of [R, H], in any float dtypes, N at least 1; float64 is merged
    in float64. bases says what the lses are in, for all of them or one by one; the result's lse is
    natural-log. Special values: the module's docstring.

    ValueError: no state, shapes that don't fit, bases that aren't one per state or differ, a NaN
    lse under raise_on_nan.
    """
    outs, lses = list(outs), list(lses)
    base = _one_base(bases, len(lses))
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs: {len(outs)} states; lses has {len(lses)}, accepted are 1 and more")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.ndim != 3 or out.shape != outs[0].shape:
            raise ValueError(
                f"outs: shape {shape_of(out)} of state {i}; accepted is [R, H, Dv], the same for "
                f"all, and state 0 has {shape_of(outs[0])}"
            )
        if lse.shape != out.shape[:2]:
            raise ValueError(
                f"lses: shape {shape_of(lse)} of state {i}; its out needs {shape_of(out[..., 0])}"
            )
        if raise_on_nan and bool(lse.isnan().any()):
            row, head = lse.isnan().nonzero()[0].tolist()
            raise ValueError(f"lses: NaN in state {i} at row {row}, head {head}")
    wide = any(tensor.dtype == torch.float64 for tensor in (*outs, *lses))
    dtype = torch.float64 if wide else torch.float32
    lse = torch.stack([natural_lse(lse.to(dtype), base) for lse in lses])
    weights, merged_lse = _weights(lse)
    return DecodeResult(_weighted_sum(weights[..., None], outs, dtype), merged_lse)


def merge_oracle(parts: Sequence[DecodeOracleResult]) -> DecodeOracleResult:
    """Merges the oracle's results of all ranks into that over all keys, in float64, with p2.

    p2 adds up in squares: sqrt(sum_r w_r^2 p2_r^2), with w_r the rank's share of the softmax.
    """
    merged = merge_states([part.out for part in parts], [part.lse for part in parts])
    weights, _ = _weights(torch.stack([natural_lse(part.lse, "natural") for part in parts]))
    squares = _weighted_sum(weights.square(), [part.p2.square() for part in parts], torch.float64)
    return DecodeOracleResult(merged.out, merged.lse, torch.sqrt(squares))


def _weights(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The share of each state [N, R, H], NaN in all of a poisoned row's, and the merged lse."""
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    m = lse.amax(0)  # R H, NaN where any is
    # -inf - (-inf) would be NaN: where no state has a key, any finite reference serves.
    reference = m.masked_fill(m == -math.inf, 0.0)
    share = torch.exp(lse - reference)  # N R H
    Z = share.sum(0)  # R H
    weights = torch.where(Z == 0, 0.0, share / Z)
    return weights, reference + torch.log(Z)


def _weighted_sum(weights: Tensor, states: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """sum_r w_r x_r; a state of weight 0 is left out, since 0 times what lies there may be NaN."""
    total = torch.zeros(states[0].shape, dtype=dtype, device=states[0].device)
    for weight, state in zip(weights, states, strict=True):
        total += torch.where(weight == 0, 0.0, weight * state.to(dtype))
    return total


def _one_base(bases: LseBase | Sequence[LseBase], states: int) -> LseBase:
    if isinstance(bases, str):
        return _check_base(bases)
    if len(bases) != states:
        raise ValueError(f"bases: {len(bases)} words; accepted is one, or one for each of {states}")
    different: list[LseBase] = sorted({_check_base(base) for base in bases})
    if len(different) > 1:
        raise ValueError(
            f"bases: mixed ({', '.join(bases)}); accepted is one base for all: convert with "
            "natural_lse first"
        )
    return different[0]


def _check_base(base: LseBase) -> LseBase:
    if base not in ("natural", "base2"):
        raise ValueError(f"bases: {base!r}; accepted are 'natural' and 'base2'")
    return base
