"""Device memory of one implementation on one case, in a process of its own, as a line of JSON.

    python -m compare.bench.memory CASE NAME DEVICE

A device's peak never falls, so each contender has a fresh process that runs its program once. JAX
allocates from a pool, in pieces of 256 bytes; what compiling took of it may make the peak larger
than the program's own, never smaller.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

from compare.bench.measurement import MemoryRow

SECONDS = 500


def ask(case: str, name: str, device: str) -> MemoryRow:
    """Measures in a child process. RuntimeError with the end of what a failed one printed."""
    words = [sys.executable, "-m", "compare.bench.memory", case, name, device]
    child = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if child.returncode:
        end = child.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"the process that measures ended with {child.returncode}: {end[0]}")
    return MemoryRow(**json.loads(child.stdout.splitlines()[-1]))


def measured(case: str, name: str, device: str) -> MemoryRow:
    """Measures in this process, whose first JAX program this has to be."""
    import jax

    from compare.protocol.timing import prepare
    from compare.run.registry import in_process
    from compare.suites.table import SUITES, make_inputs, parse_case

    parsed = parse_case(case)
    bench = SUITES[parsed.suite].bench()
    assert bench is not None and bench.planned is not None
    inputs, implementation = make_inputs(parsed), part_of(in_process(name, device), parsed.suite)
    ready = prepare(implementation, inputs)
    if ready.program is None:
        raise NotImplementedError(f"{name} is no program of JAX; its memory isn't measured")
    analysis = ready.program.memory_analysis()
    chip = jax.devices({"cuda": "gpu"}.get(device.partition(":")[0], "cpu"))[0]
    before = chip.memory_stats()
    ready.launch(1)
    after = chip.memory_stats()
    peak = None
    if before is not None and after is not None:
        peak = after["peak_bytes_in_use"] - before["bytes_in_use"]
    planned = bench.planned(inputs, implementation)
    return MemoryRow(
        case=case,
        name=name,
        planned_workspace_bytes=planned.workspace,
        list_bytes=planned.lists,
        result_bytes=planned.results,
        xla_argument_bytes=analysis.argument_size_in_bytes,
        xla_output_bytes=analysis.output_size_in_bytes,
        xla_temp_bytes=analysis.temp_size_in_bytes,
        measured_peak_bytes=peak,
    )


def part_of(implementation: object, suite: str) -> object:
    """The implementation of one suite behind a name that serves several."""
    parts = getattr(implementation, "parts", None)
    return parts[suite] if isinstance(parts, dict) else implementation


if __name__ == "__main__":
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    print(json.dumps(dataclasses.asdict(measured(*sys.argv[1:]))))
