"""The two witnesses of one case, shared by all of its candidates: the float64 oracle, and the eager
yardstick that shows what this precision loses. Computed when first asked for, in blocks of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from jaxtyping import Float64, Int64, Shaped

from compare.cases.inputs import SparsePrefillInputs
from compare.judging.metrics import Distance, to_float64
from compare.judging.row_kinds import KeyFacts, RowKinds
from compare.judging.threads import in_order
from compare.judging.tolerance import FLASHMLA, Bounds, calibrated_bounds, reciprocal_is_flushed
from compare.judging.verdict import TensorMetrics

if TYPE_CHECKING:
    import torch

    from torch_ref import Variant

EVERY_ROW_FLOP = 5e11
"""Up to this many FLOP (2 T H K (D + 512)) every row is judged by the oracle."""

SAMPLED_TOKENS = 256
"""Tokens drawn by seed where the oracle can't judge every row."""

BLOCK_ELEMENTS = 1 << 18
"""Elements of out in one block: 2 MB in float64, so that a processor cache holds it."""

_CACHED_BYTES = 1 << 30


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

    torch_out [n, H, 512] bfloat16, torch_max_logits and torch_lse [n, H] float32: the yardstick's.
    torch_error [n, H]: |t - o| of out. bounds: the calibrated ones.
    """

    tokens: Int64[np.ndarray, " n"]
    kinds: RowKinds
    oracle: OracleRows
    torch_out: Shaped[np.ndarray, "n H 512"]
    torch_max_logits: Shaped[np.ndarray, "n H"]
    torch_lse: Shaped[np.ndarray, "n H"]
    torch_error: Float64[np.ndarray, "n H"]
    bounds: Bounds

    @property
    def nbytes(self) -> int:
        return self.oracle.out.nbytes + self.torch_out.nbytes + 16 * self.oracle.lse.nbytes


class Evidence:
    """Oracle and yardstick of one case.

    inputs: the case's arguments; they must be what torch_ref accepts (ValueError otherwise).
    device: where torch computes, as torch names it; None is the CPU.
    """

    def __init__(self, inputs: SparsePrefillInputs, device: str | None = None) -> None:
        self.inputs = inputs
        self.device = device
        self.keys = KeyFacts(inputs)
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
        return max(1, BLOCK_ELEMENTS // (512 * self.heads))

    def blocks(self, tokens: Int64[np.ndarray, " n"]) -> Iterator[Rows]:
        """The rows of these tokens, block by block. What fits into 1 GB is computed once."""
        for at in range(0, len(tokens), self.step):
            block = tokens[at : at + self.step]
            key = block.tobytes()
            rows = self._cache.get(key)
            if rows is None:
                rows = self._rows(block)
                if self._cached_bytes + rows.nbytes <= _CACHED_BYTES:
                    self._cache[key] = rows
                    self._cached_bytes += rows.nbytes
            yield rows

    @cached_property
    def torch_against_oracle(self) -> dict[str, TensorMetrics]:
        """Metrics of the yardstick over the sample, by tensor name."""
        distances = _distances()
        for found in in_order(_torch_distances, self.blocks(self.sample)):
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
        from torch_ref.variants import CONTRACT

        found = torch_ref.sparse_prefill_oracle(
            **self._arguments(tokens), variant=variant or CONTRACT
        )
        return OracleRows(
            out=found.out.cpu().numpy(),
            max_logits=found.max_logits.cpu().numpy(),
            lse=found.lse.cpu().numpy(),
            p2=found.p2.cpu().numpy(),
        )

    def _rows(self, tokens: np.ndarray) -> Rows:
        import torch_ref

        kinds = self.keys.rows(tokens)
        oracle = self.oracle(tokens)
        torch_result = torch_ref.sparse_prefill(**self._arguments(tokens))
        torch_out = _bfloat16_to_numpy(torch_result.out)
        torch_max, torch_lse = torch_result.max_logits.cpu(), torch_result.lse.cpu()
        sink = self.inputs.attn_sink
        with np.errstate(invalid="ignore"):
            torch_error = row_norm(to_float64(torch_out) - oracle.out)
            bounds = calibrated_bounds(
                kinds.facts,
                out_norm=row_norm(oracle.out),
                max_logits=oracle.max_logits,
                lse=oracle.lse,
                p2=oracle.p2,
                flushed=reciprocal_is_flushed(
                    oracle.max_logits,
                    oracle.lse,
                    None if sink is None else sink.astype(np.float64),
                ),
                torch_errors={
                    "out": torch_error,
                    "max_logits": np.abs(torch_max.double().numpy() - oracle.max_logits),
                    "lse": np.abs(torch_lse.double().numpy() - oracle.lse),
                },
            )
        return Rows(
            tokens=tokens,
            kinds=kinds,
            oracle=oracle,
            torch_out=torch_out,
            torch_max_logits=torch_max.numpy(),
            torch_lse=torch_lse.numpy(),
            torch_error=torch_error,
            bounds=bounds,
        )

    @cached_property
    def _kv(self) -> torch.Tensor:
        kv = self.inputs.kv
        return _to_torch(kv if kv.flags.writeable else kv.copy(), self.device)

    @cached_property
    def _sink(self) -> torch.Tensor | None:
        sink = self.inputs.attn_sink
        return None if sink is None else _to_torch(np.array(sink), self.device)

    def _arguments(self, tokens: np.ndarray) -> dict[str, Any]:
        """torch_ref's arguments for these tokens: only their rows are copied."""
        inputs, lengths = self.inputs, self.inputs.topk_length
        return {
            "q": _to_torch(inputs.q[tokens], self.device),
            "kv": self._kv,
            "indices": _to_torch(inputs.indices[tokens], self.device),
            "sm_scale": inputs.sm_scale,
            "d_v": inputs.d_v,
            "attn_sink": self._sink,
            "topk_length": None if lengths is None else _to_torch(lengths[tokens], self.device),
        }


def _distances() -> dict[str, Distance]:
    return {name: Distance(name, rule) for name, rule in FLASHMLA.items()}


def _torch_distances(rows: Rows) -> dict[str, Distance]:
    """The yardstick's distances to the oracle in one block."""
    kinds, distances = rows.kinds, _distances()
    places = places_of(rows.tokens, kinds.undefined.shape[1])
    for name, got in (
        ("out", rows.torch_out),
        ("max_logits", rows.torch_max_logits),
        ("lse", rows.torch_lse),
    ):
        skip = kinds.undefined | (kinds.nan_score if name == "max_logits" else False)
        expected = getattr(rows.oracle, name)
        shape = (len(places), *expected.shape[2:])
        distances[name].add(got.reshape(shape), expected.reshape(shape), places, skip.ravel())
    return distances


def places_of(tokens: Int64[np.ndarray, " n"], heads: int) -> Int64[np.ndarray, "n*H 2"]:
    """(token, head) of every row of these tokens, in order."""
    return np.stack([np.repeat(tokens, heads), np.tile(np.arange(heads), len(tokens))], axis=1)


def row_norm(block: Float64[np.ndarray, "... Dv"]) -> Float64[np.ndarray, "..."]:
    """Euclidean norm over the last axis."""
    return np.sqrt(np.einsum("...d,...d->...", block, block))


def _to_torch(array: np.ndarray, device: str | None) -> torch.Tensor:
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _bfloat16_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    import torch

    return tensor.cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
