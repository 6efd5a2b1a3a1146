"""Float64 oracle and eager yardstick of one case, shared by all of its candidates. The yardstick
shows what the kernels' precision loses. Both are computed when first asked for, in blocks of
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Int64

from compare.judging.device import block_elements
from compare.judging.elements import Pair
from compare.judging.metrics import Distance, Tolerance
from compare.judging.row_kinds import RowKinds
from compare.judging.rows import OracleRows, Rows, places_of
from compare.judging.threads import in_order
from compare.protocol.verdict import TensorMetrics

EVERY_ROW_FLOP = 5e11
"""Up to this many FLOP (2 T H K (D + 512)) every row is judged by the oracle."""

SAMPLED_TOKENS = 256
"""Tokens drawn by seed where the oracle can't judge every row."""

_CACHED_BYTES = 1 << 30
_CACHED_BYTES_CUDA = 1 << 29
"""Less than on the host: kernels under test share the GPU's memory, often in several processes."""


class Witness(Protocol):
    """What a suite knows about the rows of one case: what Evidence is made of.

    inputs: what the suite's judge is given; its q is [T, H, D]. device: where torch computes, as
    torch names it; None is the CPU.
    """

    inputs: Any
    device: str | None

    @property
    def tolerances(self) -> Mapping[str, Tolerance]:
        """The tensors, with the tolerances by which metrics count matching elements."""
        ...

    @property
    def flop(self) -> float:
        """Multiply-adds times two of one pass over all keys."""
        ...

    @property
    def widest(self) -> int:
        """Elements of the largest array that a token has a row of."""
        ...

    def kinds(self, tokens: Int64[np.ndarray, " n"]) -> RowKinds:
        """Which special values the rows of these tokens must hold."""
        ...

    def rows(self, tokens: Int64[np.ndarray, " n"]) -> Rows:
        """Oracle and yardstick on these tokens, with bounds."""
        ...

    def oracle(self, tokens: Int64[np.ndarray, " n"], variant: Any = None) -> OracleRows:
        """The oracle on these tokens; variant: a known deviation from the contract."""
        ...

    def notes(self, blocks: Iterable[Rows]) -> tuple[str, ...]:
        """Sentences about the case itself; blocks: those of the sample."""
        ...


class Evidence[W: Witness]:
    """Oracle and yardstick of one case, by its suite's witness."""

    def __init__(self, witness: W) -> None:
        self.witness = witness
        self.inputs: Any = witness.inputs
        self.device = witness.device
        self.num_tokens, self.heads = map(int, witness.inputs.q.shape[:2])
        self._cache: dict[bytes, Rows] = {}
        self._cached_bytes = 0

    @property
    def complete(self) -> bool:
        """Whether every row is judged by the oracle."""
        return self.witness.flop <= EVERY_ROW_FLOP or self.num_tokens <= SAMPLED_TOKENS

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
        return max(1, block_elements(self.device) // self.witness.widest)

    def blocks(self, tokens: Int64[np.ndarray, " n"]) -> Iterator[Rows]:
        """The rows of these tokens, block by block. What fits into 1 GB of host memory, or half as
        much of a GPU's, is computed once.
        """
        on_gpu = torch.device(self.device or "cpu").type == "cuda"
        most = _CACHED_BYTES_CUDA if on_gpu else _CACHED_BYTES
        for at in range(0, len(tokens), self.step):
            block = tokens[at : at + self.step]
            key = block.tobytes()
            rows = self._cache.get(key)
            if rows is None:
                rows = self.witness.rows(block)
                if self._cached_bytes + rows.nbytes <= most:
                    self._cache[key] = rows
                    self._cached_bytes += rows.nbytes
            yield rows

    def oracle(self, tokens: Int64[np.ndarray, " n"], variant: Any = None) -> OracleRows:
        """The oracle on these tokens, uncached; variant: a known deviation from the contract."""
        return self.witness.oracle(tokens, variant)

    @cached_property
    def torch_against_oracle(self) -> dict[str, TensorMetrics]:
        """Metrics of the yardstick over the sample, by tensor name."""
        tolerances = self.witness.tolerances
        distances = _distances(tolerances)
        measure = partial(_torch_distances, tolerances)
        for found in in_order(measure, self.blocks(self.sample), self.device):
            for name, distance in found.items():
                distances[name].merge(distance)
        return {name: distance.metrics() for name, distance in distances.items()}

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the case itself."""
        return self.witness.notes(self.blocks(self.sample))


def _distances(tolerances: Mapping[str, Tolerance]) -> dict[str, Distance]:
    return {name: Distance(name, rule) for name, rule in tolerances.items()}


def _torch_distances(tolerances: Mapping[str, Tolerance], rows: Rows) -> dict[str, Distance]:
    """The yardstick's distances to the oracle in one block."""
    kinds, distances = rows.kinds, _distances(tolerances)
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
