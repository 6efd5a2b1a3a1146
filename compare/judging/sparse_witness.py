"""Oracle and yardstick of one sparse attention call over plain keys: the suite sparse-prefill, and
the one call that a V4 prefill is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int64

from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.device import rows_at, upload
from compare.judging.notes import case_notes
from compare.judging.parts import exact_slack
from compare.judging.row_kinds import KeyFacts, RowKinds
from compare.judging.rows import OracleRows, Rows, bounded_rows, oracle_rows
from compare.judging.tolerance import FLASHMLA

if TYPE_CHECKING:
    from torch_ref import Variant


class SparseWitness:
    """What oracle and yardstick say about one call.

    inputs: the call's arguments; they must be what torch_ref accepts (ValueError otherwise).
    merges_parts: results may have been merged from parts, so exact data gets its slack.
    """

    tolerances = FLASHMLA

    def __init__(
        self, inputs: SparsePrefillInputs, device: str | None = None, *, merges_parts: bool = False
    ) -> None:
        self.inputs = inputs
        self.device = device
        self.keys = KeyFacts(inputs, device)
        self._merges_parts = merges_parts

    @property
    def flop(self) -> float:
        """Multiply-adds times two of one pass over all slots."""
        T, H, D = self.inputs.q.shape
        return 2.0 * T * H * self.inputs.indices.shape[1] * (D + 512)

    @property
    def widest(self) -> int:
        """Elements of out or of indices that a token has, whichever are more."""
        return max(512 * self.inputs.q.shape[1], self.inputs.indices.shape[1])

    def kinds(self, tokens: Int64[np.ndarray, " n"]) -> RowKinds:
        """Which special values the rows of these tokens must hold."""
        return self.keys.rows(tokens)

    def rows(self, tokens: Int64[np.ndarray, " n"]) -> Rows:
        """Oracle and yardstick on these tokens."""
        import torch_ref

        arguments = self._arguments(tokens)
        kinds = self.keys.rows(tokens, arguments["q"], arguments["indices"])
        oracle = torch_ref.sparse_prefill_oracle(**arguments)
        yardstick = torch_ref.sparse_prefill(**arguments)
        rows = bounded_rows(tokens, kinds, oracle, yardstick, self.inputs.attn_sink)
        if not self._merges_parts:
            return rows
        return dataclasses.replace(
            rows, slack=upload(exact_slack(rows.lse), self.device)[..., None]
        )

    def oracle(self, tokens: Int64[np.ndarray, " n"], variant: Variant | None = None) -> OracleRows:
        """The oracle on these tokens; variant: a known deviation from the contract."""
        import torch_ref
        from torch_ref.prefill.variants import CONTRACT

        return oracle_rows(
            torch_ref.sparse_prefill_oracle(**self._arguments(tokens), variant=variant or CONTRACT)
        )

    def notes(self, blocks: Iterable[Rows]) -> tuple[str, ...]:
        """Sentences about a sink that can't be seen, repeated keys, and rows left out."""
        return case_notes(self.inputs, blocks)

    @cached_property
    def _sink(self) -> torch.Tensor | None:
        sink = self.inputs.attn_sink
        return None if sink is None else upload(sink, self.device)

    def _arguments(self, tokens: np.ndarray) -> dict[str, Any]:
        """torch_ref's arguments for these tokens: only their rows are copied."""
        inputs, lengths = self.inputs, self.inputs.topk_length
        return {
            "q": upload(rows_at(inputs.q, tokens), self.device),
            "kv": self.keys.kv,
            "indices": upload(rows_at(inputs.indices, tokens), self.device),
            "sm_scale": inputs.sm_scale,
            "d_v": inputs.d_v,
            "attn_sink": self._sink,
            "topk_length": None if lengths is None else upload(lengths[tokens], self.device),
        }
