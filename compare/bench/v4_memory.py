"""Device memory of one form of the V4 path, in a process of its own, as a line of JSON.

    python -m compare.bench.v4_memory --shape SHAPE --backend pallas [--fused]

A device's peak never falls, so each contender has a fresh process that runs its program once. The
data are torch's and no part of JAX's numbers. JAX allocates from a pool, in pieces of 256 bytes;
what compiling took of it may make the peak larger than the program's own, never smaller.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import torch

from compare.bench import v4_sides as sides
from compare.bench.measure import wait
from compare.bench.measurement import MemoryRow
from compare.bench.v4_shape import Shape

SECONDS = 500


def ask(shape: Shape, backend: str, *, fused: bool, seed: int, device: str) -> MemoryRow:
    """Measured in a child process. Raises RuntimeError with the end of what a failed one said."""
    words = [
        sys.executable, "-m", "compare.bench.v4_memory", "--device", device,
        "--shape", ",".join(map(str, dataclasses.astuple(shape))), "--backend", backend,
        "--seed", str(seed), *(["--fused"] if fused else []),
    ]  # fmt: skip
    child = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    if child.returncode:
        end = child.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"the process that measures ended with {child.returncode}: {end[0]}")
    return MemoryRow(**json.loads(child.stdout.splitlines()[-1]))


def measured(shape: Shape, backend: str, *, fused: bool, seed: int, device: str) -> MemoryRow:
    """In this process, whose first JAX program this has to be."""
    program = sides.compile_path(shape, backend, fused=fused)
    analysis = program.memory_analysis()
    data = sides.make_data(shape, seed, device)
    wait(data.q.device)
    arrays = {name: jax.dlpack.from_dlpack(tensor) for name, tensor in data.arrays.items()}
    chip = arrays["q"].devices().pop()
    before = chip.memory_stats()
    result = jax.block_until_ready(program(arrays))
    after = chip.memory_stats()
    peak = None
    if before is not None and after is not None:
        peak = after["peak_bytes_in_use"] - before["bytes_in_use"]
    del result
    return MemoryRow(
        case=shape.case,
        name=backend + (sides.FUSED if fused else sides.WHOLE),
        planned_workspace_bytes=0 if fused else shape.workspace_bytes,
        list_bytes=shape.list_bytes,
        result_bytes=shape.result_bytes,
        xla_argument_bytes=analysis.argument_size_in_bytes,
        xla_output_bytes=analysis.output_size_in_bytes,
        xla_temp_bytes=analysis.temp_size_in_bytes,
        measured_peak_bytes=peak,
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compare.bench.v4_memory", description=__doc__)
    parser.add_argument("--shape", required=True, type=Shape.parse)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(words)
    row = measured(
        options.shape, options.backend, fused=options.fused, seed=options.seed,
        device=options.device,
    )  # fmt: skip
    print(json.dumps(dataclasses.asdict(row)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
