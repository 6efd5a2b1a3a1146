"""What oracle and yardstick say about rows, before any candidate is looked at."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from jaxtyping import BFloat16, Float64, Int64, Shaped

from compare.judging.device import to_numpy
from compare.judging.row_kinds import RowKinds
from compare.judging.tolerance import Bounds, calibrated_bounds, reciprocal_is_flushed


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OracleRows:
    """The oracle on n tokens: out [n, H, 512], max_logits, lse, p2 [n, H], all float64."""

    out: Float64[np.ndarray, "n H 512"]
    max_logits: Float64[np.ndarray, "n H"]
    lse: Float64[np.ndarray, "n H"]
    p2: Float64[np.ndarray, "n H"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """All that is known about the rows of n tokens before a candidate is looked at.

    oracle_out [n, H, 512] float64 and yardstick_out [n, H, 512] bfloat16 lie on the device.
    max_logits, lse, p2 [n, H] float64: the oracle's. torch_max_logits and torch_lse [n, H] float32:
    the yardstick's. torch_error and out_norm [n, H]: |t - o| and |o| of out. bounds: the
    calibrated ones. part_rounding [n, H]: what the bound of out has besides for a result whose
    parts were rounded to bfloat16. slack and part_slack: on exact data, how far a right out that
    was merged from parts may be from the oracle before it is rounded; see parts.py.
    """

    tokens: Int64[np.ndarray, " n"]
    kinds: RowKinds
    oracle_out: Float64[torch.Tensor, "n H 512"]
    yardstick_out: BFloat16[torch.Tensor, "n H 512"]
    max_logits: Float64[np.ndarray, "n H"]
    lse: Float64[np.ndarray, "n H"]
    p2: Float64[np.ndarray, "n H"]
    torch_max_logits: Shaped[np.ndarray, "n H"]
    torch_lse: Shaped[np.ndarray, "n H"]
    torch_error: Float64[np.ndarray, "n H"]
    out_norm: Float64[np.ndarray, "n H"]
    bounds: Bounds
    part_rounding: Float64[np.ndarray, "n H"] | None = None
    slack: Float64[torch.Tensor, "n H _"] | None = None
    part_slack: tuple[Float64[torch.Tensor, "n H 512"], ...] = ()

    @property
    def oracle(self) -> OracleRows:
        """The oracle's rows on the host."""
        return OracleRows(
            out=to_numpy(self.oracle_out), max_logits=self.max_logits, lse=self.lse, p2=self.p2
        )

    @property
    def torch_out(self) -> Shaped[np.ndarray, "n H 512"]:
        """The yardstick's out on the host, bfloat16."""
        return to_numpy(self.yardstick_out)

    @property
    def nbytes(self) -> int:
        return self.oracle_out.nbytes + self.yardstick_out.nbytes + 16 * self.lse.nbytes


def oracle_rows(result: Any, *, max_logits: bool = True) -> OracleRows:
    """A result of torch_ref's oracles on the host; without max_logits they are NaN here."""
    lse = to_numpy(result.lse)
    return OracleRows(
        out=to_numpy(result.out),
        max_logits=to_numpy(result.max_logits) if max_logits else np.full(lse.shape, np.nan),
        lse=lse,
        p2=to_numpy(result.p2),
    )


def bounded_rows(
    tokens: Int64[np.ndarray, " n"],
    kinds: RowKinds,
    oracle: Any,
    yardstick: Any,
    sink: Shaped[np.ndarray, " H"] | None = None,
) -> Rows:
    """The rows of n tokens with their calibrated bounds. oracle, yardstick: torch_ref's results on
    these tokens; a yardstick without max_logits has NaN there.
    """
    max_logits, lse, p2 = map(to_numpy, (oracle.max_logits, oracle.lse, oracle.p2))
    torch_lse = to_numpy(yardstick.lse)
    torch_max, max_error = np.full_like(torch_lse, np.nan), np.zeros_like(lse)
    torch_error = to_numpy(torch.linalg.vector_norm(yardstick.out - oracle.out, dim=-1))
    out_norm = to_numpy(torch.linalg.vector_norm(oracle.out, dim=-1))
    with np.errstate(invalid="ignore"):
        if (maxima := getattr(yardstick, "max_logits", None)) is not None:
            torch_max = to_numpy(maxima)
            max_error = np.abs(torch_max.astype(np.float64) - max_logits)
        bounds = calibrated_bounds(
            kinds.facts,
            out_norm=out_norm,
            max_logits=max_logits,
            lse=lse,
            p2=p2,
            flushed=reciprocal_is_flushed(
                max_logits, lse, None if sink is None else sink.astype(np.float64)
            ),
            torch_errors={
                "out": torch_error,
                "max_logits": max_error,
                "lse": np.abs(torch_lse.astype(np.float64) - lse),
            },
        )
    return Rows(
        tokens=tokens,
        kinds=kinds,
        oracle_out=oracle.out,
        yardstick_out=yardstick.out,
        max_logits=max_logits,
        lse=lse,
        p2=p2,
        torch_max_logits=torch_max,
        torch_lse=torch_lse,
        torch_error=torch_error,
        out_norm=out_norm,
        bounds=bounds,
    )


def places_of(tokens: Int64[np.ndarray, " n"], heads: int) -> Int64[np.ndarray, "n*H 2"]:
    """(token, head) of every row of these tokens, in order."""
    return np.stack([np.repeat(tokens, heads), np.tile(np.arange(heads), len(tokens))], axis=1)


def row_norm(block: Float64[np.ndarray, "... Dv"]) -> Float64[np.ndarray, "..."]:
    """Euclidean norm over the last axis."""
    return np.sqrt(np.einsum("...d,...d->...", block, block))
