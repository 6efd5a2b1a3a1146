"""Faults that every attention suite may have: of heads, of tokens, and of what is returned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from compare.judging.faults import Fault, Hypothesis, Sample
from compare.judging.metrics import to_float64
from compare.judging.result_view import ResultView
from compare.judging.rows import OracleRows


def _times(factor: float, sample: Sample) -> OracleRows:
    contract = sample.contract
    return dataclasses.replace(contract, lse=contract.lse * factor)


def _neighbours(step: int, sample: Sample) -> OracleRows:
    evidence = sample.evidence
    return evidence.oracle((sample.tokens + step) % evidence.num_tokens)


def _nothing(_: Any, sample: Sample) -> OracleRows:
    contract = sample.contract
    return dataclasses.replace(contract, out=np.zeros_like(contract.out))


LSE_TIMES_LN_2 = Fault(
    name="lse-times-ln-2",
    sentence="lse is the natural one times ln 2, as if it had been in base 2",
    each=lambda _: (math.log(2.0),),
    rows=_times,
)

OUT_ALL_ZERO = Fault(name="out-all-zero", sentence="out is 0 everywhere", rows=_nothing)

NEIGHBOUR_TOKENS = tuple(
    Fault(
        name="neighbour-token-rows",
        which=word,
        sentence=f"each token has the rows of the token {word} it",
        possible=lambda inputs: inputs.q.shape[0] > 1,
        each=lambda _, step=step: (step,),
        rows=_neighbours,
    )
    for step, word in ((-1, "before"), (1, "after"))
)


def heads_rotated(variant: Any) -> Fault:
    """Heads in another order; variant: head h's results at head h + 1, which calibration plants.
    Diagnosis looks for the order that fits the candidate.
    """
    return Fault(
        name="heads-rotated",
        sentence="head h holds head h - 1 in every output",
        variant=variant,
        possible=lambda inputs: inputs.q.shape[1] > 1,
        search=head_orders,
    )


def head_orders(sample: Sample, view: ResultView) -> Iterator[Hypothesis]:
    """Heads in another order: the order that fits out best, and the one that fits lse best."""
    H = sample.evidence.heads
    if H == 1:
        return
    at, out = view.out(sample.tokens)
    if len(at) != len(sample.tokens) * H:
        return
    out = to_float64(out).reshape(len(sample.tokens), H, -1)
    lse = to_float64(view.statistics(sample.tokens)["lse"])
    contract = sample.contract
    orders = []
    for mine, theirs in ((out, contract.out), (lse[..., None], contract.lse[..., None])):
        orders += _likely_orders(mine, theirs)
    seen: set[bytes] = {np.arange(H).tobytes()}
    for order in orders:
        if order.tobytes() in seen:
            continue
        seen.add(order.tobytes())
        shift = (-int(order[0])) % H
        rotated = (order == (np.arange(H) - shift) % H).all()
        name = "heads-rotated" if rotated else "heads-permuted"
        what = f"head h holds head (h - {shift}) mod {H}" if rotated else "heads are out of order"
        yield Hypothesis(
            name=name,
            sentence=f"{what} in every output",
            rows=lambda order=order: OracleRows(
                out=contract.out[:, order],
                max_logits=contract.max_logits[:, order],
                lse=contract.lse[:, order],
                p2=contract.p2[:, order],
            ),
        )
        yield Hypothesis(
            name=name,
            sentence=f"{what} in out, not in lse",
            rows=lambda order=order: dataclasses.replace(
                contract, out=contract.out[:, order], p2=contract.p2[:, order]
            ),
        )
        yield Hypothesis(
            name=name,
            sentence=f"{what} in lse and max_logits, not in out",
            rows=lambda order=order: dataclasses.replace(
                contract,
                max_logits=contract.max_logits[:, order],
                lse=contract.lse[:, order],
            ),
        )


def _likely_orders(mine: np.ndarray, theirs: np.ndarray) -> list[np.ndarray]:
    """Of [n, H, X] tensors: the rotation of heads with the least squared distance, and the order
    that pairs each head with its nearest, where that is a permutation.
    """
    fine = np.isfinite(mine).all(axis=(1, 2)) & np.isfinite(theirs).all(axis=(1, 2))
    mine, theirs = mine[fine], theirs[fine]
    if len(mine) == 0:
        return []
    H = mine.shape[1]
    product = np.einsum("nhx,ngx->hg", mine, theirs)
    square = np.einsum("ngx,ngx->g", theirs, theirs)
    apart = square[None, :] - 2.0 * product  # of my head h to their head g, less |mine|^2
    heads = np.arange(H)
    rotations = [(heads - shift) % H for shift in range(H)]
    orders = [min(rotations, key=lambda order: apart[heads, order].sum())]
    nearest = apart.argmin(axis=1)
    if len(np.unique(nearest)) == H:
        orders.append(nearest)
    return orders
