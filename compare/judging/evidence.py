"""The two witnesses of one case, shared by all of its candidates: the float64 oracle, and the eager
yardstick that shows what this precision loses. Computed when first asked for, in blocks of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import BFloat16, Float64, Int64, Shaped

from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.device import block_elements, rows_at, to_numpy, upload
from compare.judging.elements import Pair
from compare.judging.metrics import Distance, Tolerance
from compare.judging.row_kinds import KeyFacts, RowKinds
from compare.judging.threads import in_order
from compare.judging.tolerance import FLASHMLA, Bounds, calibrated_bounds, reciprocal_is_flushed
from compare.protocol.verdict import TensorMetrics

if TYPE_CHECKING:
    from torch_ref import Variant

EVERY_ROW_FLOP = 5e11
"""Up to this many FLOP (2 T H K (D + 512)) every row is judged by the oracle."""

SAMPLED_TOKENS = 256
"""Tokens drawn by seed where the oracle can't judge every row."""

_CACHED_BYTES = 1 << 30
_CACHED_BYTES_CUDA = 1 << 29
"""Less than on the host: kernels under test share the GPU's memory, often in several processes."""


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
    calibrated ones.
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


class Evidence:
    """Oracle and yardstick of one case.

    inputs: the case's arguments; they must be what torch_ref accepts (ValueError otherwise).
    device: where torch computes, as torch names it; None is the CPU.
    """

    rules: Mapping[str, Tolerance] = FLASHMLA
    """The tensors, with the tolerances by which metrics count matching elements."""

    def __init__(self, inputs: SparsePrefillInputs, device: str | None = None) -> None:
        self.inputs = inputs
        self.device = device
        self.keys = KeyFacts(inputs, device)
        self._cache: dict[bytes, Rows] = {}
        self._cached_bytes = 0

    @property
    def num_tokens(self) -> int:
        return self.inputs.q.shape[0]

    @property
    def heads(self) -> int:
        return self.inputs.q.shape[1]

    @property
    def flop(self) -> float:
        """Multiply-adds times two of one pass over all slots."""
        T, H, D = self.inputs.q.shape
        return 2.0 * T * H * self.inputs.indices.shape[1] * (D + 512)

    @property
    def complete(self) -> bool:
        """Whether every row is judged by the oracle."""
        return self.flop <= EVERY_ROW_FLOP or self.num_tokens <= SAMPLED_TOKENS

    @cached_property
    def sample(self) -> Int64[np.ndarray, " n"]:
        """The tokens that the oracle judges in any case, ascending: all, or 256 drawn by seed."""
        if self.complete:
            return np.arange(self.num_tokens)
        seed = getattr(self.inputs.case, "seed", 0)
        drawn = np.random.default_rng(seed).choice(self.num_tokens, SAMPLED_TOKENS, replace=False)
        return np.sort(drawn)

    @property
    def step(self) -> int:
        """Tokens in a block."""
        widest = max(512 * self.heads, self.inputs.indices.shape[1])
        return max(1, block_elements(self.device) // widest)

    def blocks(self, tokens: Int64[np.ndarray, " n"]) -> Iterator[Rows]:
        """The rows of these tokens, block by block. What fits into 1 GB of host memory, or half as
        much of a GPU's, is computed once.
        """
        most = _CACHED_BYTES_CUDA if self.keys.kv.is_cuda else _CACHED_BYTES
        for at in range(0, len(tokens), self.step):
            block = tokens[at : at + self.step]
            key = block.tobytes()
            rows = self._cache.get(key)
            if rows is None:
                rows = self._rows(block)
                if self._cached_bytes + rows.nbytes <= most:
                    self._cache[key] = rows
                    self._cached_bytes += rows.nbytes
            yield rows

    @cached_property
    def torch_against_oracle(self) -> dict[str, TensorMetrics]:
        """Metrics of the yardstick over the sample, by tensor name."""
        distances = _distances(self.rules)
        measure = partial(_torch_distances, self.rules)
        for found in in_order(measure, self.blocks(self.sample), self.device):
            for name, distance in found.items():
                distances[name].merge(distance)
        return {name: distance.metrics() for name, distance in distances.items()}

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the case itself; see notes.py."""
        from compare.judging.notes import case_notes

        return case_notes(self.inputs, self.blocks(self.sample))

    def oracle(self, tokens: Int64[np.ndarray, " n"], variant: Variant | None = None) -> OracleRows:
        """The oracle on these tokens, uncached; variant: a known deviation from the contract."""
        import torch_ref
        from torch_ref.prefill.variants import CONTRACT

        found = torch_ref.sparse_prefill_oracle(
            **self._arguments(tokens), variant=variant or CONTRACT
        )
        return OracleRows(
            out=to_numpy(found.out),
            max_logits=to_numpy(found.max_logits),
            lse=to_numpy(found.lse),
            p2=to_numpy(found.p2),
        )

    def _rows(self, tokens: np.ndarray) -> Rows:
        import torch_ref

        arguments = self._arguments(tokens)
        kinds = self.keys.rows(tokens, arguments["q"], arguments["indices"])
        oracle = torch_ref.sparse_prefill_oracle(**arguments)
        yardstick = torch_ref.sparse_prefill(**arguments)
        max_logits, lse, p2 = map(to_numpy, (oracle.max_logits, oracle.lse, oracle.p2))
        torch_max, torch_lse = to_numpy(yardstick.max_logits), to_numpy(yardstick.lse)
        torch_error = to_numpy(torch.linalg.vector_norm(yardstick.out - oracle.out, dim=-1))
        out_norm = to_numpy(torch.linalg.vector_norm(oracle.out, dim=-1))
        sink = self.inputs.attn_sink
        with np.errstate(invalid="ignore"):
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
                    "max_logits": np.abs(torch_max.astype(np.float64) - max_logits),
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
            slack=self._slack(lse),
        )

    def _slack(self, lse: Float64[np.ndarray, "n H"]) -> Float64[torch.Tensor, "n H _"] | None:
        """What exact data allows a result that was merged from parts; see Rows."""
        return None

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


def _distances(rules: Mapping[str, Tolerance]) -> dict[str, Distance]:
    return {name: Distance(name, rule) for name, rule in rules.items()}


def _torch_distances(rules: Mapping[str, Tolerance], rows: Rows) -> dict[str, Distance]:
    """The yardstick's distances to the oracle in one block."""
    kinds, distances = rows.kinds, _distances(rules)
    places = places_of(rows.tokens, kinds.undefined.shape[1])
    for name, got, expected in (
        ("out", rows.yardstick_out, rows.oracle_out),
        ("max_logits", torch.from_numpy(rows.torch_max_logits), torch.from_numpy(rows.max_logits)),
        ("lse", torch.from_numpy(rows.torch_lse), torch.from_numpy(rows.lse)),
    ):
        if name not in distances:
            continue
        skip = kinds.undefined | (kinds.nan_score if name == "max_logits" else False)
        left_out = torch.from_numpy(skip.ravel()).to(got.device) if skip.any() else None
        pair = Pair(got.flatten(0, 1), expected.flatten(0, 1), left_out)
        distances[name].add(pair, places)
    return distances


def places_of(tokens: Int64[np.ndarray, " n"], heads: int) -> Int64[np.ndarray, "n*H 2"]:
    """(token, head) of every row of these tokens, in order."""
    return np.stack([np.repeat(tokens, heads), np.tile(np.arange(heads), len(tokens))], axis=1)


def row_norm(block: Float64[np.ndarray, "... Dv"]) -> Float64[np.ndarray, "..."]:
    """Euclidean norm over the last axis."""
    return np.sqrt(np.einsum("...d,...d->...", block, block))
