"""Oracle and yardstick of one decode case, shared by all of its candidates.

Where ranks were merged the oracle is the one call over all keys; the ranks' own oracles say how
large their parts are, and must together be that one call.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from compare.judging import evidence
from compare.judging.device import block_elements, to_numpy, upload
from compare.judging.evidence import OracleRows, Rows
from compare.judging.parts import (
    PART_ROUNDING,
    exact_part_slack,
    exact_slack,
    merged_bounds,
)
from compare.judging.tolerance import calibrated_bounds
from compare.suites.dcp_decode.call import DcpDecodeInputs
from compare.suites.dcp_decode.facts import DecodeFacts, stored
from compare.suites.dcp_decode.tolerance import FLASHMLA_DENSE

if TYPE_CHECKING:
    from torch_ref import DecodeOracleResult, DecodeVariant

_SAME = 1e-9
"""How far the merged oracles of all ranks may be from the oracle of all keys, relatively."""


class Evidence(evidence.Evidence):
    """Oracle and yardstick of one case.

    inputs: the case's arguments; they must be what torch_ref accepts, and shards, where there are
    any, must share out the keys of the whole (ValueError otherwise). device: where torch computes,
    as torch names it; None is the CPU.
    """

    rules = FLASHMLA_DENSE

    def __init__(self, inputs: DcpDecodeInputs, device: str | None = None) -> None:
        self.inputs = inputs
        self.device = device
        self._cache = {}
        self._cached_bytes = 0
        self._whole = _arguments(inputs, device)
        self._shards = [_arguments(shard, device) for shard in inputs.shards or ()]
        self.keys = DecodeFacts(inputs, self._whole["q"], self._whole["kv_cache"], device)

    @property
    def flop(self) -> float:
        """Multiply-adds times two of one pass over all keys that the rows see."""
        return 2.0 * self.heads * float(self.keys.keys.sum()) * (self.inputs.q.shape[2] + 512)

    @property
    def step(self) -> int:
        """Tokens in a block."""
        return max(1, block_elements(self.device) // (512 * self.heads))

    def oracle(
        self, tokens: Int64[np.ndarray, " n"], variant: DecodeVariant | None = None
    ) -> OracleRows:
        """The oracle on these tokens, uncached; variant: a known deviation from the contract, on
        every rank where ranks are merged.
        """
        import torch_ref

        if variant is None or not self._shards:
            found = _oracle(self._whole, tokens, variant)
        else:
            found = torch_ref.merge_oracle(self.parts(tokens, variant))
        return as_rows(found)

    def whole(self, tokens: Int64[np.ndarray, " n"], variant: DecodeVariant) -> OracleRows:
        """A deviation of the one call over all keys."""
        return as_rows(_oracle(self._whole, tokens, variant))

    def parts(
        self, tokens: Int64[np.ndarray, " n"], variant: DecodeVariant | None = None
    ) -> list[DecodeOracleResult]:
        """The ranks' own oracles; [] where no ranks are merged."""
        return [_oracle(shard, tokens, variant) for shard in self._shards]

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the case itself: rows that aren't compared."""
        undefined = sum(
            int(np.count_nonzero(rows.kinds.undefined)) for rows in self.blocks(self.sample)
        )
        if not undefined:
            return ()
        return (
            f"{undefined} rows have infinite inputs, scores past 1e30 or a NaN behind their last "
            "key and were not compared",
        )

    def _rows(self, tokens: np.ndarray) -> Rows:
        import torch_ref

        kinds = self.keys.rows(tokens)
        oracle = _oracle(self._whole, tokens)
        yardstick = torch_ref.dcp_decode(**self._whole, rows=tokens.tolist())
        assert oracle.max_logits is not None
        max_logits, lse, p2 = map(to_numpy, (oracle.max_logits, oracle.lse, oracle.p2))
        torch_lse = to_numpy(yardstick.lse)
        torch_error = to_numpy(torch.linalg.vector_norm(yardstick.out - oracle.out, dim=-1))
        out_norm = to_numpy(torch.linalg.vector_norm(oracle.out, dim=-1))
        with np.errstate(invalid="ignore"):
            bounds = calibrated_bounds(
                kinds.facts,
                out_norm=out_norm,
                max_logits=max_logits,
                lse=lse,
                p2=p2,
                flushed=np.zeros(lse.shape, bool),
                torch_errors={
                    "out": torch_error,
                    "max_logits": np.zeros_like(lse),
                    "lse": np.abs(torch_lse.astype(np.float64) - lse),
                },
            )
        mass = self._mass(tokens, oracle) if self._shards else None
        rounding = np.zeros_like(lse)
        if mass is not None:
            mass_norm = to_numpy(torch.linalg.vector_norm(mass, dim=-1))
            rounding = PART_ROUNDING * mass_norm
            bounds = merged_bounds(
                bounds,
                kinds.facts,
                size=mass_norm + out_norm,
                max_logits=max_logits,
                lse=lse,
            )
        return Rows(
            tokens=tokens,
            kinds=kinds,
            oracle_out=oracle.out,
            yardstick_out=yardstick.out,
            max_logits=max_logits,
            lse=lse,
            p2=p2,
            torch_max_logits=np.full_like(torch_lse, np.nan),
            torch_lse=torch_lse,
            torch_error=torch_error,
            out_norm=out_norm,
            bounds=bounds,
            part_rounding=rounding,
            slack=upload(exact_slack(lse), self.device)[..., None] if self._exact else None,
            part_slack=exact_part_slack(mass, oracle.out) if self._exact else (),
        )

    def _mass(self, tokens: np.ndarray, whole: DecodeOracleResult) -> Float64[Tensor, "n H 512"]:
        """sum_r w_r |o_r|. ValueError where the ranks together aren't the whole call."""
        import torch_ref

        parts = self.parts(tokens)
        merged = torch_ref.merge_oracle(parts)
        for name in ("out", "lse"):
            got, due = getattr(merged, name), getattr(whole, name)
            size = due.abs().nan_to_num(0.0, 0.0, 0.0).max() if due.numel() else 0.0
            if not torch.allclose(got, due, rtol=_SAME, atol=_SAME * float(size), equal_nan=True):
                raise ValueError(
                    f"shards: {name} of all ranks merged isn't that of the one call over all keys; "
                    "accepted are shards that hold each of its keys once"
                )
        mass = torch.zeros_like(whole.out)
        for part in parts:
            weight = torch.where(part.lse == -torch.inf, 0.0, torch.exp(part.lse - whole.lse))
            mass += weight[..., None] * part.out.abs()
        return mass

    @property
    def _exact(self) -> bool:
        return getattr(self.inputs.case, "data", None) == "exact"


def as_rows(found: DecodeOracleResult) -> OracleRows:
    """An oracle's result on the host; decode has no max_logits, which are NaN here."""
    return OracleRows(
        out=to_numpy(found.out),
        max_logits=np.full(tuple(found.lse.shape), np.nan),
        lse=to_numpy(found.lse),
        p2=to_numpy(found.p2),
    )


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
