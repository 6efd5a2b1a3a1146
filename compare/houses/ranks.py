"""All ranks of a decode step, run one after the other here and merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import ml_dtypes
import numpy as np

from compare.judging.attention_call import PARTS
from compare.protocol import arrays as convert

Merge = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], tuple[np.ndarray, np.ndarray]]
"""(outs, lses) of the ranks -> out and lse of all keys."""


class RankInputs(Protocol):
    """One rank's call with q [T, H, D]; or, with shards, that over all keys and each rank's own."""

    @property
    def q(self) -> np.ndarray: ...
    @property
    def dcp_rank(self) -> int: ...
    @property
    def dcp_world(self) -> int: ...
    @property
    def shards(self) -> tuple[Self, ...] | None: ...


class RankResult(Protocol):
    """A dataclass with out [T, H, 512] and lse [T, H] of one rank's keys, or of all; parts: how
    parts were rounded before they were merged, of PARTS."""

    @property
    def out(self) -> np.ndarray: ...
    @property
    def lse(self) -> np.ndarray: ...
    @property
    def parts(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


def merge_by_torch(
    outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """torch_ref.merge_states, on the CPU in float32."""
    import torch_ref

    merged = torch_ref.merge_states(
        [convert.to_torch(out) for out in outs], [convert.to_torch(lse) for lse in lses]
    )
    return convert.to_numpy(merged.out), convert.to_numpy(merged.lse)


def merge_by_jax(
    outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """jax_impl.merge_states, on the CPU; out keeps its dtype."""
    from compare.houses.jax_backend import import_jax, jax_device

    jax = import_jax()
    from jax_impl.decode import merge_states

    merge: Any = merge_states  # NumPy arrays are as welcome as jax's
    with jax.default_device(jax_device("cpu")):
        merged = merge(list(outs), list(lses))
        return np.asarray(merged.out), np.asarray(merged.lse)


def run_shards[I: RankInputs, R: RankResult](
    call: Callable[[I], R], inputs: I, *, merge: Merge = merge_by_torch
) -> R:
    """Calls `call` once for each of inputs.shards and merges the results; out is rounded to
    bfloat16 once, at the end.

    ValueError without shards, and where a rank's out and lse haven't the shape of its q.
    """
    if not inputs.shards:
        raise ValueError("inputs: shards is empty; accepted is one call for each rank")
    parts = [_part(call, shard) for shard in inputs.shards]
    out, lse = merge([part.out for part in parts], [part.lse for part in parts])
    kept = sorted({part.out.dtype.name for part in parts})
    notes = [note for part in parts for note in part.notes]
    notes.append(f"{len(parts)} ranks merged, each rank's out in {' and '.join(kept)}")
    merged: Any = parts[0]
    return dataclasses.replace(
        merged,
        out=out.astype(ml_dtypes.bfloat16),
        lse=lse,
        parts=PARTS[_roundings(parts)],
        notes=tuple(dict.fromkeys(notes)),
    )


def _roundings(results: Sequence[RankResult]) -> int:
    """How often parts were rounded: within a rank, before the ranks are merged."""
    of_ranks = any(result.out.dtype == ml_dtypes.bfloat16 for result in results)
    within = any(result.parts != PARTS[0] for result in results)
    return of_ranks + within


def _part[I: RankInputs, R: RankResult](call: Callable[[I], R], shard: I) -> R:
    result = call(shard)
    tokens, heads, _ = shard.q.shape
    for name, wanted in (("out", (tokens, heads, 512)), ("lse", (tokens, heads))):
        shape = getattr(result, name).shape
        if shape != wanted:
            raise ValueError(
                f"rank {shard.dcp_rank} of {shard.dcp_world}: {name} has shape {list(shape)}; "
                f"its q needs {list(wanted)}"
            )
    return result
