"""Oracle and yardstick of one V4 prefill, shared by all of its candidates: those of the one plain
sparse prefill that the batch is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from compare.judging import evidence
from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.device import rows_at, to_numpy, upload
from compare.judging.evidence import OracleRows
from compare.judging.parts import exact_slack
from compare.judging.plans import PlanChunk
from compare.suites.v4_prefill.call import V4PrefillInputs
from compare.suites.v4_prefill.rows import FlatRows

if TYPE_CHECKING:
    from torch_ref.v4.inputs import V4Inputs
    from torch_ref.v4.variants import Through, V4Variant


class Evidence(evidence.Evidence):
    """Oracle and yardstick of one case.

    path: the case's arguments; inputs: the same batch as one sparse prefill, whose keys `flat`
    names. arguments: torch_ref's, checked (ValueError where it doesn't accept them). device: where
    torch computes, as torch names it; None is the CPU.
    """

    def __init__(self, path: V4PrefillInputs, device: str | None = None) -> None:
        from torch_ref.v4.flat import flatten

        self.path = path
        self.arguments = _checked(path, device)
        call = flatten(self.arguments)
        self.flat = FlatRows(path)
        super().__init__(
            SparsePrefillInputs(
                q=path.q,
                kv=to_numpy(call.kv),
                indices=to_numpy(call.indices),
                sm_scale=path.sm_scale,
                attn_sink=path.attn_sink,
                topk_length=to_numpy(call.topk_length),
                case=path.case,
            ),
            device,
        )

    def _slack(self, lse: Float64[np.ndarray, "n H"]) -> Float64[torch.Tensor, "n H _"]:
        return upload(exact_slack(lse), self.device)[..., None]

    def deviation(
        self,
        tokens: Int64[np.ndarray, " n"],
        variant: V4Variant,
        plan: tuple[PlanChunk, ...],
        *,
        through: Through,
    ) -> tuple[OracleRows, Bool[np.ndarray, " n"]]:
        """The oracle on these tokens with a known deviation from the path, and for which of them it
        can't be told; see variant_call.
        """
        import torch_ref
        from torch_ref.v4.variants import variant_call

        call, unknown = variant_call(
            self.arguments,
            variant,
            plan,
            tokens.tolist(),
            through=through,
        )
        found = torch_ref.sparse_prefill_oracle(
            q=upload(rows_at(self.path.q, tokens), self.device),
            kv=call.kv,
            indices=call.indices,
            sm_scale=self.path.sm_scale,
            attn_sink=self.arguments.attn_sink,
            topk_length=call.topk_length,
        )
        rows = OracleRows(
            out=to_numpy(found.out),
            max_logits=to_numpy(found.max_logits),
            lse=to_numpy(found.lse),
            p2=to_numpy(found.p2),
        )
        return rows, unknown.numpy()


def _checked(path: V4PrefillInputs, device: str | None) -> V4Inputs:
    from torch_ref.v4.inputs import check_v4_inputs

    names = (
        "q",
        "swa_cache",
        "swa_block_table",
        "query_start_loc",
        "seq_lens",
        "compressed_cache",
        "compressed_block_table",
        "topk_indices",
        "attn_sink",
    )
    arrays: dict[str, Any] = {
        name: None if array is None else upload(array, device)
        for name in names
        for array in (getattr(path, name),)
    }
    return check_v4_inputs(
        **arrays,
        sm_scale=path.sm_scale,
        swa_page=path.swa_page,
        kv_format=path.kv_format,
        compress_ratio=path.compress_ratio,
        compressed_page=path.compressed_page,
        window=path.window,
        image_spans=path.image_spans,
        max_image_tokens=path.max_image_tokens,
    )
