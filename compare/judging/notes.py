"""What a reader should know about a case whatever the candidate did."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.rows import Rows

HALF_ULP = 2.0**-9
"""A factor closer to 1 than this is 1 in bfloat16."""


def case_notes(inputs: SparsePrefillInputs, blocks: Iterable[Rows]) -> tuple[str, ...]:
    """Sentences about a sink that can't be seen, repeated keys, and rows left out."""
    repeated = most = undefined = 0
    sink = inputs.attn_sink
    sink_seen = sink is None or np.isneginf(sink).all()
    sunk_rows = 0
    for rows in blocks:
        copies = rows.kinds.facts.copies
        repeated += int(np.count_nonzero(copies > 1))
        most = max(most, int(copies.max(initial=0)))
        undefined += int(np.count_nonzero(rows.kinds.undefined))
        if sink is not None and not sink_seen:
            ordinary = ~(rows.kinds.empty[:, None] | rows.kinds.nan_score | rows.kinds.undefined)
            with np.errstate(over="ignore", invalid="ignore"):
                taken = 1.0 / (1.0 + np.exp(rows.lse - sink.astype(np.float64)))
            sunk_rows += int(np.count_nonzero(ordinary))
            sink_seen = bool((ordinary & ~(taken < HALF_ULP)).any())
    notes = []
    if not sink_seen and sunk_rows:
        notes.append(
            "the sink changes no row by half a bfloat16 ulp: nothing here shows whether it is used"
        )
    if repeated:
        notes.append(
            f"{repeated} token rows name a key more than once, up to {most} times; each time counts"
        )
    if undefined:
        notes.append(
            f"{undefined} rows have infinite inputs or scores past 1e30 and were not compared"
        )
    return tuple(notes)
