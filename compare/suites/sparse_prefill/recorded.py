"""Recorded results of sparse prefill."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float32

from compare.goldens.rows import RowRecords, Share, sink_rows
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.inputs import Inputs, Result
from compare.protocol.records import failure
from compare.protocol.verdict import Verdict
from compare.suites.sparse_prefill.case import SparsePrefillCase


class SparsePrefillRecords(RowRecords):
    """max_logits and lse of every row."""

    largest_folder = 3_500_000
    # One of sixty cases of 6 MB before compression; max_logits and lse.
    share = Share(most=96, fewest=32, bytes=6_000_000 // 60, statistics=2 * 4)
    statistics = ("max_logits", "lse")
    result_type = SparsePrefillResult

    def kinds(
        self, inputs: SparsePrefillInputs, lse: Float32[np.ndarray, "T H"]
    ) -> dict[str, Bool[np.ndarray, "T H"]]:
        """No valid slot; an lse that isn't finite; a head whose sink is special."""
        valid = (inputs.indices >= 0) & (inputs.indices < len(inputs.kv))
        if inputs.topk_length is not None:
            valid &= np.arange(inputs.indices.shape[1]) < inputs.topk_length[:, None]
        return {
            "empty": np.broadcast_to(~valid.any(1)[:, None], lse.shape),
            "lse not finite": ~np.isfinite(lse),
            **sink_rows(inputs.attn_sink, lse.shape),
        }

    def refusal(self, judge: Callable[..., Verdict], inputs: Inputs, result: Result) -> str | None:
        # FlashMLA's tolerances are absolute numbers for the size of its own data: with values ten
        # times as large, the rounding of a right kernel is outside them where an element is near
        # zero.
        own = isinstance(inputs.case, SparsePrefillCase) and inputs.case.data == "flashmla"
        profile = "both" if own else "calibrated"
        return failure(judge(inputs, result, None, profile=profile))
