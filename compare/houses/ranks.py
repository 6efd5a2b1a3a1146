"""All ranks of a decode step, run one after the other here and merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from compare.protocol import arrays as convert
from compare.protocol.inputs import Result
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult

Merge = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], tuple[np.ndarray, np.ndarray]]
"""(outs, lses) of the ranks -> out and lse of all keys."""


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


def run_shards(
    implementation: Any, inputs: DcpDecodeInputs, *, merge: Merge | None = None
) -> DcpDecodeResult:
    """Calls `implementation` (its `run`, or a function like it) once for each of inputs.shards and
    merges the results; out is rounded to bfloat16 once, at the end.

    merge: by default the implementation's own (`merge`), else torch_ref's.

    ValueError without shards, and where a rank's out and lse haven't the shape of its q.
    """
    if not inputs.shards:
        raise ValueError("inputs: shards is empty; accepted is one call for each rank")
    call: Callable[[DcpDecodeInputs], Result] = getattr(implementation, "run", implementation)
    if merge is None:
        merge = getattr(implementation, "merge", merge_by_torch)
    parts = [_part(call, shard) for shard in inputs.shards]
    assert merge is not None
    out, lse = merge([part.out for part in parts], [part.lse for part in parts])
    kept = sorted({part.out.dtype.name for part in parts})
    notes = [note for part in parts for note in part.notes]
    notes.append(f"{len(parts)} ranks merged, each rank's out in {' and '.join(kept)}")
    return DcpDecodeResult(
        out=out.astype(ml_dtypes.bfloat16),
        lse=lse,
        parts=_parts_of(parts),
        notes=tuple(dict.fromkeys(notes)),
    )


def _parts_of(results: Sequence[DcpDecodeResult]) -> str:
    """What the merged result says of its parts: DcpDecodeResult.parts."""
    rounded = "bfloat16" in {result.out.dtype.name for result in results}
    rounded_before = any(result.parts != "float32" for result in results)
    return ("float32", "bfloat16", "bfloat16 twice")[rounded + rounded_before]


def _part(call: Callable[[DcpDecodeInputs], Result], shard: DcpDecodeInputs) -> DcpDecodeResult:
    result = call(shard)
    assert isinstance(result, DcpDecodeResult)
    tokens, heads, _ = shard.q.shape
    for name, wanted in (("out", (tokens, heads, 512)), ("lse", (tokens, heads))):
        found = getattr(result, name).shape
        if found != wanted:
            raise ValueError(
                f"rank {shard.dcp_rank} of {shard.dcp_world}: {name} has shape {list(found)}; "
                f"its q needs {list(wanted)}"
            )
    return result
