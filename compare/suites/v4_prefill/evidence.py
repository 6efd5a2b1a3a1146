"""Oracle and yardstick of one V4 prefill: those of the plain sparse prefill that the batch is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int64

from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.device import rows_at, to_numpy, upload
from compare.judging.evidence import Evidence
from compare.judging.plans import PlanChunk
from compare.judging.row_kinds import RowKinds
from compare.judging.rows import OracleRows, Rows, oracle_rows
from compare.judging.sparse_witness import SparseWitness
from compare.suites.v4_prefill.call import V4_PREFILL_ARRAYS, V4PrefillInputs
from compare.suites.v4_prefill.rows import FlatRows

if TYPE_CHECKING:
    from torch_ref.v4.inputs import V4Inputs
    from torch_ref.v4.variants import Through, V4Variant


def evidence_of(inputs: V4PrefillInputs, device: str | None = None) -> Evidence[V4Witness]:
    """Oracle and yardstick of one case. inputs: what torch_ref accepts (ValueError otherwise)."""
    return Evidence(V4Witness(inputs, device))


class V4Witness:
    """What oracle and yardstick say about one batch.

    inputs: the batch. arguments: torch_ref's. attention: the same batch as one sparse prefill,
    `call`, whose keys `flat` names.
    """

    def __init__(self, inputs: V4PrefillInputs, device: str | None = None) -> None:
        from torch_ref.v4.flat import flatten

        self.inputs = inputs
        self.device = device
        self.arguments = _checked(inputs, device)
        self.flat = FlatRows(inputs)
        flat = flatten(self.arguments)
        self.call = SparsePrefillInputs(
            q=inputs.q,
            kv=to_numpy(flat.kv),
            indices=to_numpy(flat.indices),
            sm_scale=inputs.sm_scale,
            attn_sink=inputs.attn_sink,
            topk_length=to_numpy(flat.topk_length),
            case=inputs.case,
        )
        self.attention = SparseWitness(self.call, device, merges_parts=True)
        self.tolerances = self.attention.tolerances
        self.flop = self.attention.flop
        self.widest = self.attention.widest

    def kinds(self, tokens: Int64[np.ndarray, " n"]) -> RowKinds:
        """Which special values the rows of these tokens must hold."""
        return self.attention.kinds(tokens)

    def rows(self, tokens: Int64[np.ndarray, " n"]) -> Rows:
        """Oracle and yardstick on these tokens."""
        return self.attention.rows(tokens)

    def oracle(self, tokens: Int64[np.ndarray, " n"], variant: Any = None) -> OracleRows:
        """The oracle on these tokens; variant: a deviation of the attention alone."""
        return self.attention.oracle(tokens, variant)

    def notes(self, blocks: Iterable[Rows]) -> tuple[str, ...]:
        """Sentences about the case itself."""
        return self.attention.notes(blocks)

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
            self.arguments, variant, plan, tokens.tolist(), through=through
        )
        result = torch_ref.sparse_prefill_oracle(
            q=upload(rows_at(self.inputs.q, tokens), self.device),
            kv=call.kv,
            indices=call.indices,
            sm_scale=self.inputs.sm_scale,
            attn_sink=self.arguments.attn_sink,
            topk_length=call.topk_length,
        )
        return oracle_rows(result), unknown.numpy()


def _checked(inputs: V4PrefillInputs, device: str | None) -> V4Inputs:
    from torch_ref.v4.inputs import check_v4_inputs

    arrays: dict[str, Any] = {
        name: None if array is None else upload(array, device)
        for name in V4_PREFILL_ARRAYS
        if name != "seq_lens_bound"  # the planner's alone
        for array in (getattr(inputs, name),)
    }
    return check_v4_inputs(
        **arrays,
        sm_scale=inputs.sm_scale,
        swa_page=inputs.swa_page,
        kv_format=inputs.kv_format,
        compress_ratio=inputs.compress_ratio,
        compressed_page=inputs.compressed_page,
        window=inputs.window,
        image_spans=inputs.image_spans,
        max_image_tokens=inputs.max_image_tokens,
    )
