"""In what base an lse is, and what it is in an empty row: as somebody declares it, and as the judge
takes it."""

from __future__ import annotations

import math

import numpy as np

_OURS = {"sparse-prefill": "+inf", "dcp-decode": "-inf", "v4-prefill": "+inf"}
"""The lse of an empty row at the judge's border, by suite."""


def as_declared(
    lse: np.ndarray, suite: str, *, base: str = "natural", empty_lse: str | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """An lse of this base (natural or base2) whose empty rows hold `empty_lse` (+inf or -inf; None:
    what the suite has) as the suite's own, in its own dtype, and in sentences what was done.
    """
    notes, ours = [], _OURS[suite]
    if base == "base2":
        lse = (lse * np.asarray(math.log(2), lse.dtype)).astype(lse.dtype)
        notes.append("lse is declared base 2 and was multiplied by ln 2")
    if empty_lse not in (None, ours):
        # Both signs change places: ours is as wrong in its convention as its own is in ours.
        lse = np.where(np.isinf(lse), -lse, lse).astype(lse.dtype)
        notes.append(f"an empty row's lse is declared {empty_lse} and was turned into {ours}")
    return lse, tuple(notes)
