"""Which key a row lacks or has too many, read from its own sums: possible on data=exact alone.

There every visible key has weight 1 and V holds integers, so count * out is the sum of the keys
that a row used, and exp(lse) their number. A sum that is one key away from the right one names it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Shaped

from compare.judging.metrics import to_float64
from compare.judging.sides import Side
from compare.judging.sparse_witness import SparseWitness


def key_difference(
    witness: SparseWitness, side: Side, *, name: Callable[[int], str] | None = None
) -> list[str]:
    """A sentence about a wrong out's worst row where one missing or foreign key explains it; []
    elsewhere, and where data isn't exact.

    name: a row of kv in words, where a key that is no slot of the row may be the foreign one too.
    """
    if not side.exact or "out" not in side.numbers.calibrated_failures:
        return []
    view, inputs = side.view, witness.inputs
    token, head = side.numbers.worst["out"].index[:2]
    tokens = np.array([token])
    at, out = view.out(tokens)
    got = to_float64(out[at == head])[0]
    with np.errstate(over="ignore"):
        count = float(np.exp(np.float64(view.result.lse[token, head])))
    oracle = witness.oracle(tokens)
    right_count = round(float(np.exp(oracle.lse[0, head])))
    if not np.isfinite(got).all() or not abs(count - right_count) < 1.5:
        return []
    used = round(count)
    difference = got * used - oracle.out[0, head] * right_count
    # out was rounded to bfloat16, so each sum is known to half a bfloat16 ulp times the count.
    slack = np.abs(got) * used * 2.0**-8 + 1e-6
    named = inputs.indices[token]
    valid = witness.keys.valid(tokens)[0]
    place, words = f"out[{token}, {head}]", name or "key {}".format
    if used == right_count - 1:
        slot = _slot_of(inputs.kv, named, valid, -difference, slack)
        return [] if slot is None else [f"{place} lacks {words(named[slot])} of slot {slot}"]
    if used == right_count + 1:
        slot = _slot_of(inputs.kv, named, np.ones_like(valid), difference, slack)
        if slot is not None:
            why = "" if valid[slot] else ", which is past the row's length"
            return [f"{place} counts {words(named[slot])} of slot {slot}{why} once too often"]
        every = np.arange(len(inputs.kv) if name else 0)
        key = _slot_of(inputs.kv, every, np.ones(len(every), bool), difference, slack)
        if key is not None:
            return [f"{place} counts {words(key)}, which its token doesn't see"]
    return []


def _slot_of(
    kv: Shaped[np.ndarray, "S D"],
    named: np.ndarray,
    among: np.ndarray,
    wanted: Float64[np.ndarray, " Dv"],
    slack: Float64[np.ndarray, " Dv"],
) -> int | None:
    """The first of the slots `among` whose value is `wanted`; None if there isn't one key alone."""
    slots = np.flatnonzero(among & (named >= 0) & (named < len(kv)))
    values = to_float64(kv[named[slots], : len(wanted)])
    fits = slots[(np.abs(values - wanted) <= slack).all(axis=1)]
    return int(fits[0]) if len(set(named[fits].tolist())) == 1 else None
