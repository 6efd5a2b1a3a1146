"""Recorded results of decode."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32

from compare.generate.ownership import local_length
from compare.goldens.rows import RowRecords, Share
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult


class DcpDecodeRecords(RowRecords):
    """lse of every row, and in what dtype results over parts of the keys stood."""

    largest_folder = 2_150_000
    ending = "_decode"
    # One of fifty cases of 2 MB, and there are two kernels; lse alone.
    share = Share(most=36, fewest=24, bytes=2_000_000 // 50, statistics=4)
    statistics = ("lse",)
    facts = ("parts",)
    result_type = DcpDecodeResult

    def kinds(
        self, inputs: DcpDecodeInputs, lse: Float32[np.ndarray, "T H"]
    ) -> dict[str, Bool[np.ndarray, "T H"]]:
        """Padding; no visible key; an lse of another row that isn't finite."""
        tokens = np.arange(len(lse))
        starts = inputs.query_start_loc.astype(np.int64)
        padding = tokens >= starts[-1]
        request = np.minimum(np.searchsorted(starts, tokens, side="right") - 1, len(starts) - 2)
        empty = padding.copy()
        for token in np.flatnonzero(~padding):
            later = starts[request[token] + 1] - 1 - token if inputs.causal else 0
            bound = int(inputs.total_lens[request[token]] - later)
            own = (inputs.dcp_rank, inputs.dcp_world, inputs.interleave)
            empty[token] = local_length(max(0, bound), *own) == 0
        return {
            "padding": np.broadcast_to(padding[:, None], lse.shape),
            "no key": np.broadcast_to((empty & ~padding)[:, None], lse.shape),
            "lse not finite": ~np.isfinite(lse) & ~empty[:, None],
        }
