"""Oracle and yardstick of one decode case.

Where ranks were merged the oracle is the one call over all keys; the ranks' own oracles say how
large their parts are, and must together be that one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int64

from compare.judging.device import to_numpy, upload
from compare.judging.evidence import Evidence
from compare.judging.parts import (
    PART_ROUNDING,
    exact_part_slack,
    exact_slack,
    mass_of_ranks,
    merged_bounds,
)
from compare.judging.row_kinds import RowKinds
from compare.judging.rows import OracleRows, Rows, bounded_rows, oracle_rows
from compare.suites.dcp_decode.call import DcpDecodeInputs
from compare.suites.dcp_decode.facts import DecodeFacts, stored
from compare.suites.dcp_decode.tolerance import FLASHMLA_DENSE

if TYPE_CHECKING:
    from torch_ref import DecodeOracleResult, DecodeVariant


def evidence_of(inputs: DcpDecodeInputs, device: str | None = None) -> Evidence[DecodeWitness]:
    """Oracle and yardstick of one case. inputs: they must be what torch_ref accepts, and shards,
    where there are any, must share out the keys of the whole (ValueError otherwise).
    """
    return Evidence(DecodeWitness(inputs, device))


class DecodeWitness:
    """What oracle and yardstick say about one case. keys: what its rows see."""

    tolerances = FLASHMLA_DENSE

    def __init__(self, inputs: DcpDecodeInputs, device: str | None = None) -> None:
        self.inputs = inputs
        self.device = device
        self._whole = _arguments(inputs, device)
        self._shards = [_arguments(shard, device) for shard in inputs.shards or ()]
        self.keys = DecodeFacts(inputs, self._whole["q"], self._whole["kv_cache"], device)

    @property
    def flop(self) -> float:
        """Multiply-adds times two of one pass over all keys that the rows see."""
        _, H, D = self.inputs.q.shape
        return 2.0 * H * float(self.keys.keys.sum()) * (D + 512)

    @property
    def widest(self) -> int:
        """Elements of out that a token has."""
        return 512 * self.inputs.q.shape[1]

    def kinds(self, tokens: Int64[np.ndarray, " n"]) -> RowKinds:
        """Which special values the rows of these tokens must hold."""
        return self.keys.rows(tokens)

    def rows(self, tokens: Int64[np.ndarray, " n"]) -> Rows:
        """Oracle and yardstick on these tokens, with the bounds of merged ranks where they are."""
        import torch_ref

        oracle = _oracle(self._whole, tokens)
        yardstick = torch_ref.dcp_decode(**self._whole, rows=tokens.tolist())
        rows = bounded_rows(tokens, self.kinds(tokens), oracle, yardstick)
        bounds, rounding, mass = rows.bounds, np.zeros_like(rows.lse), None
        if self._shards:
            mass = mass_of_ranks(self.parts(tokens), oracle.out, oracle.lse)
            mass_norm = to_numpy(torch.linalg.vector_norm(mass, dim=-1))
            rounding = PART_ROUNDING * mass_norm
            bounds = merged_bounds(
                bounds,
                rows.kinds.facts,
                size=mass_norm + rows.out_norm,
                max_logits=rows.max_logits,
                lse=rows.lse,
            )
        exact = getattr(self.inputs.case, "data", None) == "exact"
        return dataclasses.replace(
            rows,
            bounds=bounds,
            part_rounding=rounding,
            slack=upload(exact_slack(rows.lse), self.device)[..., None] if exact else None,
            part_slack=exact_part_slack(mass, oracle.out) if exact else (),
        )

    def oracle(
        self, tokens: Int64[np.ndarray, " n"], variant: DecodeVariant | None = None
    ) -> OracleRows:
        """The oracle on these tokens; variant: a known deviation from the contract, on every rank
        where ranks are merged.
        """
        import torch_ref

        if variant is None or not self._shards:
            return as_rows(_oracle(self._whole, tokens, variant))
        return as_rows(torch_ref.merge_oracle(self.parts(tokens, variant)))

    def whole(self, tokens: Int64[np.ndarray, " n"], variant: DecodeVariant) -> OracleRows:
        """A deviation of the one call over all keys."""
        return as_rows(_oracle(self._whole, tokens, variant))

    def parts(
        self, tokens: Int64[np.ndarray, " n"], variant: DecodeVariant | None = None
    ) -> list[DecodeOracleResult]:
        """The ranks' own oracles; [] where no ranks are merged."""
        return [_oracle(shard, tokens, variant) for shard in self._shards]

    def notes(self, blocks: Iterable[Rows]) -> tuple[str, ...]:
        """A sentence about rows that aren't compared."""
        undefined = sum(int(np.count_nonzero(rows.kinds.undefined)) for rows in blocks)
        if not undefined:
            return ()
        return (
            f"{undefined} rows have infinite inputs, scores past 1e30 or a NaN behind their last "
            "key and were not compared",
        )


def as_rows(result: DecodeOracleResult) -> OracleRows:
    """An oracle's result on the host; decode has no max_logits, which are NaN here."""
    return oracle_rows(result, max_logits=False)


def _oracle(
    call: dict[str, Any], tokens: np.ndarray, variant: DecodeVariant | None = None
) -> DecodeOracleResult:
    import torch_ref
    from torch_ref.decode.variants import CONTRACT

    return torch_ref.dcp_decode_oracle(**call, rows=tokens.tolist(), variant=variant or CONTRACT)


def _arguments(inputs: DcpDecodeInputs, device: str | None) -> dict[str, Any]:
    """torch_ref's arguments, on the device; ValueError where it doesn't accept them."""
    from torch_ref.decode.inputs import check_decode_inputs

    names = ("block_table", "seq_lens", "query_start_loc", "total_lens")
    arguments: dict[str, Any] = {
        "q": stored(inputs.q, device),
        "kv_cache": stored(inputs.kv_cache, device),
        **{name: upload(getattr(inputs, name), device) for name in names},
        "sm_scale": inputs.sm_scale,
        "dcp_rank": inputs.dcp_rank,
        "dcp_world": inputs.dcp_world,
        "interleave": inputs.interleave,
        "causal": inputs.causal,
        "kv_scale": inputs.kv_scale,
        "q_scale": inputs.q_scale,
    }
    check_decode_inputs(**arguments)
    return arguments
