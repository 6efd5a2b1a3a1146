"""Measures the judge of decode: how much of its bounds right kernels use, how far faults lie
outside.

    python -m compare.calibrate.decode --cases 1000 --shapes 20 --out FILE.json

Right kernels: `xla` as the registry has it, its ranks merged in float32, and models of kernels that
take other liberties, whose parts (ranges of keys, ranks) are rounded to bfloat16 and merged. Faults
are planted into the oracle as in `compare.calibrate.calibrate`, which writes the table too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from compare.calibrate.calibrate import SCHEMA, Shares, command, fault_rows
from compare.calibrate.decode_cases import (
    Splitting,
    faults,
    keys_per_range,
    random_cases,
    run,
    with_fault,
)
from compare.calibrate.model_kernels import Freedom
from compare.judging.sides import share_by_tensor
from compare.report.environment import environment
from compare.run import registry
from compare.suites.dcp_decode import judge as dcp_decode
from compare.suites.dcp_decode.call import DcpDecodeResult
from compare.suites.dcp_decode.judge import evidence_of, side_of
from compare.suites.dcp_decode.make import dcp_decode_inputs

MODELS = {
    "one range": Freedom(),
    "shuffled blocks of 32, lazy rescale (2^8)": Freedom(block=32, order="shuffled", lazy=8.0),
    "truncated, fast math, P rounded twice": Freedom(
        truncates=True, fast_math=True, rounds_twice=True
    ),
}
RIGHT = ("xla", *MODELS, "ranges in bfloat16", "ranks in bfloat16")


def calibrate(cases: int, shapes: int, seed: int, console: Console | None = None) -> dict[str, Any]:
    """The measurement as plain data; as compare.calibrate.calibrate.calibrate."""
    right = {name: Shares(dcp_decode.judge) for name in RIGHT}
    wrong: dict[str, list[tuple[float, str]]] = defaultdict(list)
    xla = registry.find("xla", "cpu")
    rng = np.random.default_rng(seed)
    batches = set()
    started = time.monotonic()
    todo = random_cases(cases, shapes, seed)
    for case in track(todo, "calibrating", cases, console=console or Console(stderr=True)):
        inputs = dcp_decode_inputs(case)
        evidence, line = evidence_of(inputs), str(case)
        batches.add((case.lens, case.q, case.h, case.page, case.kv))
        result = xla.run(inputs)
        assert isinstance(result, DcpDecodeResult)
        right["xla"].add(line, inputs, result, evidence)
        if case.kv == "bf16":
            name = list(MODELS)[int(rng.integers(len(MODELS)))]
            split = keys_per_range(inputs, rng) if rng.random() < 0.5 else 0
            result = run(inputs, Splitting(freedom=MODELS[name], split=split), rng)
            if inputs.shards:
                name = "ranks in bfloat16"
            elif result.parts == "bfloat16":
                name = "ranges in bfloat16"
            right[name].add(line, inputs, result, evidence)
        possible = faults(inputs)
        fault = list(possible)[int(rng.integers(len(possible)))]
        result = with_fault(evidence, possible[fault])
        if result is not None:
            wrong[fault].append(
                (max(share_by_tensor(evidence, side_of(inputs, result)).values()), line)
            )
    return {
        "schema": SCHEMA,
        "kind": "judge-calibration-decode",
        "environment": environment(),
        "cases": cases,
        "distinct_shapes": len(batches),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "right": {name: shares.summary() for name, shares in right.items()},
        "faults": fault_rows(wrong),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a right kernel raised an alarm."""
    parser = argparse.ArgumentParser(prog="python -m compare.calibrate.decode", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000)
    parser.add_argument("--shapes", type=int, default=20, help="at most this many batches")
    return command(parser, arguments, calibrate, ("lse",))


if __name__ == "__main__":
    sys.exit(main())
