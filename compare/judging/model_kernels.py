"""Right kernels that this machine may not have, modelled in NumPy.

The contract leaves open in which blocks and in which order keys are walked, against which maximum P
is rounded to bfloat16 and how often, and how a matrix unit rounds its sums. The judge's bounds must
admit all of it; `compare.calibrate` measures how much of them each takes.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Float64

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.metrics import to_float64

_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_MMA = 16
"""Columns that a tensor core of Hopper sums before it rounds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Freedom:
    """How one right kernel uses what the contract leaves open.

    block: keys in a block. order: ascending, descending or shuffled blocks. lazy: how far, in base
    2, the maximum may grow before the sums are rescaled; 0 rescales at once. rounds_twice: P of
    every other block is rounded, rescaled to the next block's maximum and rounded again; FlashMLA
    comes near this, it rescales P of the first block of each pair for half of the columns.
    truncates: sums of 16 products are added as Hopper's tensor cores do, towards zero. fast_math:
    exp2 with relative errors up to 2^-22, subnormals flushed.
    """

    block: int = 64
    order: str = "ascending"
    lazy: float = 0.0
    rounds_twice: bool = False
    truncates: bool = False
    fast_math: bool = False


def run(
    inputs: SparsePrefillInputs, freedom: Freedom, rng: np.random.Generator
) -> SparsePrefillResult:
    """Sparse prefill as such a kernel computes it; rng shuffles blocks and draws exp2's errors."""
    T, H, _ = inputs.q.shape
    out = np.zeros((T, H, inputs.d_v), ml_dtypes.bfloat16)
    max_logits = np.full((T, H), -np.inf, np.float32)
    lse = np.full((T, H), np.inf, np.float32)
    for token in range(T):
        index = inputs.indices[token]
        valid = (index >= 0) & (index < len(inputs.kv))
        if inputs.topk_length is not None:
            valid &= np.arange(len(index)) < inputs.topk_length[token]
        if not valid.any():
            continue
        keys = np.zeros((len(index), inputs.kv.shape[1]), np.float64)
        keys[valid] = to_float64(inputs.kv[index[valid]])
        with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
            out[token], max_logits[token], lse[token] = _token(
                to_float64(inputs.q[token]), keys, valid, inputs, freedom, rng
            )
    return SparsePrefillResult(out=out, max_logits=max_logits, lse=lse)


def run_in_ranges(
    inputs: SparsePrefillInputs, slots: int, freedom: Freedom, rng: np.random.Generator
) -> SparsePrefillResult:
    """The same by a kernel that takes `slots` slots of a row at a time, rounds each range's out to
    bfloat16 and merges them in float32. Without a sink.
    """
    if inputs.attn_sink is not None:
        raise ValueError("attn_sink: ranges of slots have none; accepted is None")
    place = np.arange(inputs.indices.shape[1])
    indices = inputs.indices
    if inputs.topk_length is not None:
        indices = np.where(place < inputs.topk_length[:, None], indices, -1)
    ranges = [
        run(
            dataclasses.replace(inputs, indices=indices[:, at : at + slots], topk_length=None),
            freedom,
            rng,
        )
        for at in place[::slots]
    ]
    lses = np.stack([np.where(np.isposinf(part.lse), -np.inf, part.lse) for part in ranges])
    outs = np.stack([part.out.astype(np.float32) for part in ranges])
    largest = lses.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(lses - np.where(np.isneginf(largest), np.float32(0.0), largest))
        total = weights.sum(axis=0)
        empty = total == 0
        mean = (weights[..., None] * outs).sum(axis=0) / total[..., None]
        out = np.where(empty[..., None], np.float32(0.0), mean)
        lse = np.where(empty, np.float32(np.inf), largest + np.log(total))
    maxima = [part.max_logits for part in ranges if part.max_logits is not None]
    return SparsePrefillResult(
        out=out.astype(ml_dtypes.bfloat16),
        max_logits=np.maximum.reduce(maxima),
        lse=lse.astype(np.float32),
    )


def _token(
    q: Float64[np.ndarray, "H D"],
    keys: Float64[np.ndarray, "K D"],
    valid: np.ndarray,
    inputs: SparsePrefillInputs,
    freedom: Freedom,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    H = len(q)
    dot = _truncating_product if freedom.truncates else _float32_product
    factor = np.float32(inputs.sm_scale) * _LOG2E
    scores = dot(q, keys.T) * factor
    scores[:, ~valid] = -np.inf
    starts = np.arange(0, len(keys), freedom.block)
    if freedom.order == "descending":
        starts = starts[::-1]
    elif freedom.order == "shuffled":
        starts = rng.permutation(starts)

    reference = np.full(H, -1e30, np.float32)  # what P is taken against
    maximum = reference.copy()
    L = np.zeros(H, np.float32)
    acc = np.zeros((H, inputs.d_v), np.float32)
    for step, start in enumerate(starts):
        block = slice(start, start + freedom.block)
        s = scores[:, block]
        first = np.fmax(reference, np.fmax.reduce(s, axis=1))
        maximum = np.fmax(maximum, first)
        moves = (first - reference > freedom.lazy) | (reference == np.float32(-1e30))
        shifted = np.where(moves, first, reference)
        scale = np.exp2(reference - shifted)
        reference = shifted
        p = _exp2(s - reference[:, None], freedom, rng)
        L = L * scale + p.sum(axis=1, dtype=np.float32)
        rounded = p.astype(ml_dtypes.bfloat16).astype(np.float32)
        if freedom.rounds_twice and step % 2 == 0:
            rounded = _rounded_again(
                rounded, scores, starts[step + 1 : step + 2], reference, freedom
            )
        weighted = dot(rounded.astype(np.float64), keys[block, : inputs.d_v])
        acc = acc * scale[:, None] + weighted
    weight = L
    if inputs.attn_sink is not None:
        weight = L + np.exp2(inputs.attn_sink * _LOG2E - reference)
    inverse = np.float32(1.0) / weight
    if freedom.fast_math:
        inverse = np.where(np.abs(inverse) < np.float32(2.0**-126), np.float32(0.0), inverse)
    out = (acc * inverse[:, None]).astype(ml_dtypes.bfloat16)
    return out, maximum * _LN2, np.log(L) + reference * _LN2


def _rounded_again(
    rounded: Float32[np.ndarray, "H k"],
    scores: Float32[np.ndarray, "H K"],
    next_start: np.ndarray,
    reference: Float32[np.ndarray, " H"],
    freedom: Freedom,
) -> Float32[np.ndarray, "H k"]:
    """P rescaled to the maximum that the next block brings, rounded there, and scaled back."""
    if len(next_start) == 0:
        return rounded
    following = scores[:, next_start[0] : next_start[0] + freedom.block]
    change = np.exp2(reference - np.fmax(reference, np.fmax.reduce(following, axis=1)))[:, None]
    again = (rounded * change).astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.where(change > np.float32(2.0**-100), again / change, rounded)


def _exp2(
    x: Float32[np.ndarray, "H K"], freedom: Freedom, rng: np.random.Generator
) -> Float32[np.ndarray, "H K"]:
    p = np.exp2(x)
    if not freedom.fast_math:
        return p
    error = (rng.random(p.shape, np.float32) - np.float32(0.5)) * np.float32(2.0**-21)
    error[x == 0] = 0.0
    return np.where(p < np.float32(2.0**-126), np.float32(0.0), p * (1 + error))


def _float32_product(
    a: Float64[np.ndarray, "m k"], b: Float64[np.ndarray, "k n"]
) -> Float32[np.ndarray, "m n"]:
    return a.astype(np.float32) @ b.astype(np.float32)


def _truncating_product(
    a: Float64[np.ndarray, "m k"], b: Float64[np.ndarray, "k n"]
) -> Float32[np.ndarray, "m n"]:
    """Sums of 16 exact products, each added to a float32 with rounding towards zero."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for at in range(0, a.shape[1], _MMA):
        exact = total.astype(np.float64) + a[:, at : at + _MMA] @ b[at : at + _MMA]
        total = exact.astype(np.float32)
        away = np.abs(total.astype(np.float64)) > np.abs(exact)
        total = np.where(away, np.nextafter(total, np.float32(0.0)), total)
    return total
