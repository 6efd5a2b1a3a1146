"""Results merged from parts: what the rounding of parts and the merge add to the bounds.

An attention result may be put together from parts: the ranks of a group, or the ranges of keys that
a kernel splits a request into. Part r has out o_r and lse l_r, and its weight in the whole is
w_r = exp(l_r - lse).

- Where a part's out is rounded to bfloat16 before it is merged, each of its elements is off by at
  most 2^-8 of itself (half of the spacing, 2^-7), and merging adds sum_r w_r e_r. Nothing is known
  about the signs: ranks that hold equal keys lose the same. Element by element that is at most
  2^-8 M with M = sum_r w_r |o_r|, and so the row is off by at most

      rounding = 2^-8 |M|

  more. For ranks M comes from the oracle's own parts. FlashInfer rounds the parts of a request that
  it splits on one GPU as well, and nobody but it knows where; there no term is added, since
  rounding o_r at random is within what 2 |t - o| + 2^-8 p2 leaves (measured: docs/tolerances.md).
- The merge takes fp32 lses: l_r, as wrong as an lse is (tolerance.py), is brought to the largest
  one, and ln Z is added to that: two roundings of at most one ULP at B. So

      lse: 2 ulp(B) more        out: 2 ulp(B) (|M| + |o|), at most 2 ulp(B) 4 r max |k_j|, more

  since a weight that is off by e relatively moves out by e w_r (o_r - o). It is nothing until
  scores reach thousands. These two hold for ranks; what a kernel does with its splits is inside
  of the bounds of tolerance.py, which leave four ULP where two suffice without a merge.

**data=exact.** One sum of ones and integers doesn't round, but parts do: with 3 + 5 of 8 visible
keys their outs are thirds and fifths. Each weight is off by what 4 ulp(max(1, |lse| log2 e)) make
of it, |V| is at most 8, and so a right value lies within

    slack = 4 ulp(max(1, |lse| log2 e)) 16 + (rounded parts: 2^-8 M of ranks, 2^-8 8 of ranges)

of the oracle, and is then rounded. out must be bfloat16 of such a value: bit for bit the oracle's
wherever that isn't within the slack of a tie. lse is within 4 ULP of ln(count) (2 for the
logarithm and its base, 2 for parts), ranks merged 2 more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from compare.judging.tolerance import (
    LOG2E,
    STATISTIC_ULPS,
    Bounds,
    RowFacts,
    lse_magnitude,
    ulp,
)

if TYPE_CHECKING:
    from torch_ref import DecodeOracleResult

PART_ROUNDING = 2.0**-8
MERGE_ULPS = 2.0
EXACT_MERGED_LSE_ULPS = 4.0
EXACT_LARGEST_VALUE = 8.0

_SAME = 1e-9
"""How far the ranks' oracles merged may be from that of all keys, relatively."""


def mass_of_ranks(
    parts: Sequence[DecodeOracleResult],
    out: Float64[Tensor, "n H 512"],
    lse: Float64[Tensor, "n H"],
) -> Float64[Tensor, "n H 512"]:
    """M, of the ranks' own oracles. out, lse: those of the one call over all keys, an empty row's
    lse -inf; ValueError where the ranks together aren't that call.
    """
    import torch_ref

    merged = torch_ref.merge_oracle(parts)
    for name, got, right in (("out", merged.out, out), ("lse", merged.lse, lse)):
        size = right.abs().nan_to_num(0.0, 0.0, 0.0).max() if right.numel() else 0.0
        if not torch.allclose(got, right, rtol=_SAME, atol=_SAME * float(size), equal_nan=True):
            raise ValueError(
                f"shards: {name} of all ranks merged isn't that of the one call over all keys; "
                "accepted are shards that hold each of its keys once"
            )
    mass = torch.zeros_like(out)
    for part in parts:
        weight = torch.where(part.lse == -torch.inf, 0.0, torch.exp(part.lse - lse))
        mass += weight[..., None] * part.out.abs()
    return mass


def merged_bounds(
    bounds: Bounds,
    facts: RowFacts,
    *,
    size: Float64[np.ndarray, "n H"],
    max_logits: Float64[np.ndarray, "n H"],
    lse: Float64[np.ndarray, "n H"],
) -> Bounds:
    """The bounds with what a merge of ranks in fp32 adds; size: |M| + |o|."""
    with np.errstate(invalid="ignore"):
        step = MERGE_ULPS * ulp(lse_magnitude(facts, max_logits, lse))
        beside_largest = -np.expm1(max_logits - lse)
        moved = np.minimum(size, 4.0 * beside_largest * facts.longest[:, None])
    return dataclasses.replace(bounds, out=bounds.out + step * moved, lse=bounds.lse + step)


def exact_slack(lse: Float64[np.ndarray, "n H"]) -> Float64[np.ndarray, "n H"]:
    """How far exact data's out may be from the oracle before it is rounded, parts unrounded."""
    weights = STATISTIC_ULPS * ulp(np.maximum(1.0, np.abs(lse) * LOG2E))
    return 2.0 * EXACT_LARGEST_VALUE * weights


def exact_part_slack(
    mass: Float64[Tensor, "n H 512"] | None, out: Float64[Tensor, "n H 512"]
) -> tuple[Float64[Tensor, "n H 512"], ...]:
    """What parts rounded once, and twice, add to the slack. mass: M of merged ranks, or None.

    Only the kernel knows where it splits a request: of those parts the largest value alone is
    known.
    """
    ranges = torch.full_like(out, PART_ROUNDING * EXACT_LARGEST_VALUE)
    return (ranges,) if mass is None else (PART_ROUNDING * mass, PART_ROUNDING * mass + ranges)
