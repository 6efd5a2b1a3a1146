"""In what base an lse is, and what it is in an empty row: as somebody declares it, and as the judge
takes it."""

from __future__ import annotations

import math

import numpy as np


def as_declared(
    lse: np.ndarray, judged_empty: str, *, base: str = "natural", empty_lse: str | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """An lse of this base (natural or base2) whose empty rows hold `empty_lse` (+inf or -inf; None:
    what the suite has) as the judge takes it, with `judged_empty` in empty rows, in its own dtype,
    and in sentences what was done.
    """
    notes = []
    if base == "base2":
        lse = (lse * np.asarray(math.log(2), lse.dtype)).astype(lse.dtype)
        notes.append("lse is declared base 2 and was multiplied by ln 2")
    if empty_lse not in (None, judged_empty):
        # Both signs change places: a row that is wrong by the declared convention stays wrong.
        lse = np.where(np.isinf(lse), -lse, lse).astype(lse.dtype)
        turned = f"was turned into {judged_empty}"
        notes.append(f"an empty row's lse is declared {empty_lse} and {turned}")
    return lse, tuple(notes)
