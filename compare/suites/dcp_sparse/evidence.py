"""Oracle and yardstick of sparse attention over DCP ranks: those of one call over plain keys, of
all ranks' or of one's, with what merging adds to the bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int64

from compare.generate.ownership import local_positions
from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.device import to_numpy
from compare.judging.evidence import Evidence
from compare.judging.metrics import SumTolerance
from compare.judging.parts import PART_ROUNDING, exact_part_slack, mass_of_ranks, merged_bounds
from compare.judging.row_kinds import RowKinds
from compare.judging.rows import OracleRows, Rows
from compare.judging.sparse_witness import SparseWitness
from compare.suites.dcp_sparse.call import DcpSparseInputs
from torch_ref import Variant

if TYPE_CHECKING:
    from torch_ref import DecodeOracleResult

MERGED = {
    "out": SumTolerance(absolute=1e-2, relative=1e-2),
    "lse": SumTolerance(absolute=1e-2, relative=1e-2),
}
"""Of FlashInfer's DCP tests."""

_EMPTY_LSE = Variant(empty_lse="-inf")


def evidence_of(inputs: DcpSparseInputs, device: str | None = None) -> Evidence[DcpSparseWitness]:
    """Oracle and yardstick of one case. ValueError for inputs that no implementation may be given,
    and shards that don't share out the keys of the whole.
    """
    return Evidence(DcpSparseWitness(inputs, device))


def as_prefill(inputs: DcpSparseInputs) -> SparsePrefillInputs:
    """A rank's call as one over plain keys: the slots of those that it holds, -1 for the others."""
    group = (inputs.dcp_rank, inputs.dcp_world, inputs.interleave)
    keys, P = local_positions(inputs.topk_positions, *group), inputs.kv_cache.shape[1]
    columns = inputs.block_table.shape[1]
    if (keys >= columns * P).any():
        raise ValueError(
            f"topk_positions: local key {keys.max()} of rank {inputs.dcp_rank}; block_table has "
            f"{columns} pages of {P} keys"
        )
    pages = inputs.block_table[inputs.token_to_request[:, None], np.maximum(keys, 0) // P]
    return SparsePrefillInputs(
        q=inputs.q,
        kv=inputs.kv_cache.reshape(-1, inputs.kv_cache.shape[2]),
        indices=np.where(keys >= 0, pages * P + keys % P, -1).astype(np.int32),
        sm_scale=inputs.sm_scale,
        case=inputs.case,
    )


class DcpSparseWitness:
    """What oracle and yardstick say about one case."""

    tolerances = MERGED

    def __init__(self, inputs: DcpSparseInputs, device: str | None = None) -> None:
        self.inputs = inputs
        self.device = device
        self._whole = SparseWitness(as_prefill(inputs), device, merges_parts=True)
        self._ranks = [SparseWitness(as_prefill(shard), device) for shard in inputs.shards or ()]

    @property
    def flop(self) -> float:
        """Multiply-adds times two of one pass over all lists."""
        return self._whole.flop

    @property
    def widest(self) -> int:
        """Elements of out or of a list that a token has, whichever are more."""
        return self._whole.widest

    def kinds(self, tokens: Int64[np.ndarray, " n"]) -> RowKinds:
        """Which special values the rows of these tokens must hold."""
        return self._whole.kinds(tokens)

    def rows(self, tokens: Int64[np.ndarray, " n"]) -> Rows:
        """Oracle and yardstick on these tokens, with the bounds of merged ranks where they are."""
        rows = self._whole.rows(tokens)
        empty = rows.kinds.empty[:, None]
        rows = dataclasses.replace(
            rows,
            lse=np.where(empty, -np.inf, rows.lse),
            torch_lse=np.where(empty, np.float32(-np.inf), rows.torch_lse),
        )
        if not self._ranks:
            return rows
        out = rows.oracle_out
        parts = self.parts(tokens)
        mass = mass_of_ranks(parts, out.cpu(), torch.from_numpy(rows.lse)).to(out.device)
        mass_norm = to_numpy(torch.linalg.vector_norm(mass, dim=-1))
        return dataclasses.replace(
            rows,
            bounds=merged_bounds(
                rows.bounds,
                rows.kinds.facts,
                size=mass_norm + rows.out_norm,
                max_logits=rows.max_logits,
                lse=rows.lse,
            ),
            part_rounding=PART_ROUNDING * mass_norm,
            part_slack=exact_part_slack(mass, out),
        )

    def oracle(self, tokens: Int64[np.ndarray, " n"], variant: Variant | None = None) -> OracleRows:
        """The oracle of all keys on these tokens; variant: a known deviation from the contract."""
        variant = dataclasses.replace(variant or _EMPTY_LSE, empty_lse="-inf")
        return self._whole.oracle(tokens, variant)

    def parts(self, tokens: Int64[np.ndarray, " n"]) -> list[DecodeOracleResult]:
        """The ranks' own oracles; [] where no ranks are merged."""
        import torch_ref

        rows = [rank.oracle(tokens, _EMPTY_LSE) for rank in self._ranks]
        return [
            torch_ref.DecodeOracleResult(*map(torch.from_numpy, (one.out, one.lse, one.p2)))
            for one in rows
        ]

    def notes(self, blocks: Iterable[Rows]) -> tuple[str, ...]:
        """Sentences about repeated keys, and rows left out."""
        return self._whole.notes(blocks)
