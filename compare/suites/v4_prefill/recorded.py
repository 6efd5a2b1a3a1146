"""Recorded results of the whole V4 prefill path."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32

from compare.goldens.rows import RowRecords, Share, sink_rows
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult


class V4PrefillRecords(RowRecords):
    """lse of every row, max_logits of a kernel that returns them, and in what dtype results over
    parts of the keys stood.
    """

    largest_folder = 1_000_000
    ending = "_v4"
    # One of fifty cases of 500 KB, and there are two kernels; max_logits and lse.
    share = Share(most=24, fewest=8, bytes=500_000 // 50, statistics=2 * 4)
    statistics = ("max_logits", "lse")
    optional = ("max_logits",)
    facts = ("parts",)
    result_type = V4PrefillResult

    def kinds(
        self, inputs: V4PrefillInputs, lse: Float32[np.ndarray, "T H"]
    ) -> dict[str, Bool[np.ndarray, "T H"]]:
        """An lse that isn't finite; a head whose sink is special; the first and the last token of
        each request. Every row has a key.
        """
        starts = inputs.query_start_loc - inputs.query_start_loc[0]
        tokens = np.arange(len(lse))
        ends = {"first token": starts[:-1], "last token": starts[1:] - 1}
        some = np.diff(starts) > 0
        return {
            "lse not finite": ~np.isfinite(lse),
            **sink_rows(inputs.attn_sink, lse.shape),
            **{
                kind: np.broadcast_to(np.isin(tokens, of[some])[:, None], lse.shape)
                for kind, of in ends.items()
            },
        }
