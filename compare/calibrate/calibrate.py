"""Measures the judge: how much of its bounds right kernels use, and how far faults lie outside.

    python -m compare.calibrate.calibrate --cases 10000 --shapes 100 --out FILE.json

Right kernels: `xla` as the registry has it, and models of kernels that take other liberties
(model_kernels.py). The yardstick, torch, isn't measured: its own error is the bound's unit. A fault
is planted into the oracle (torch_ref's variants), one that the inputs can show for each case, and
rounded like a result. docs/tolerances.md shows the table of a run, which `table` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compare.calibrate.cases import faults, random_cases, with_fault
from compare.calibrate.model_kernels import Freedom
from compare.calibrate.model_kernels import run as run_model
from compare.judging.attention import evidence_of, judge, side_of
from compare.judging.attention_call import SparsePrefillResult
from compare.judging.sides import share_by_tensor
from compare.protocol.inputs import Inputs, Result
from compare.protocol.verdict import Verdict
from compare.report.environment import environment
from compare.run import registry

SCHEMA = 1
STATISTICS = ("max_logits", "lse")
"""What a table shows beside out."""

MODELS = {
    "blocks of 64, ascending": Freedom(),
    "descending, lazy rescale (2^8)": Freedom(order="descending", lazy=8.0),
    "shuffled blocks of 32, lazy rescale (2^8)": Freedom(block=32, order="shuffled", lazy=8.0),
    "P rounded twice": Freedom(rounds_twice=True, lazy=8.0),
    "sums truncated as on tensor cores": Freedom(truncates=True),
    "truncated, fast math, P rounded twice": Freedom(
        truncates=True, fast_math=True, rounds_twice=True
    ),
}
"""Every kernel that is right by the contract must stay under 1 on all of them."""


def calibrate(cases: int, shapes: int, seed: int, console: Console | None = None) -> dict[str, Any]:
    """The measurement as plain data: for each right kernel its cases, its alarms (case lines with
    the reason) and its largest share by tensor; for each fault the cases that could show it, those
    that did, and its smallest and median share.
    """
    right = {name: Shares(judge) for name in ("xla", *MODELS)}
    wrong: dict[str, list[tuple[float, str]]] = defaultdict(list)
    xla = registry.find("xla", "cpu")
    rng = np.random.default_rng(seed)
    seen: set[tuple] = set()
    started = time.monotonic()
    console = console or Console(stderr=True)
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for case in progress.track(random_cases(cases, shapes, seed), total=cases):
            inputs, evidence = case.inputs, evidence_of(case.inputs)
            seen.add((*inputs.q.shape, *inputs.indices.shape, *inputs.kv.shape))
            result = xla.run(inputs)
            assert isinstance(result, SparsePrefillResult)
            right["xla"].add(str(case), inputs, result, evidence)
            if inputs.sm_scale > 0.0:
                name = list(MODELS)[int(rng.integers(len(MODELS)))]
                result = run_model(inputs, MODELS[name], rng)
                right[name].add(str(case), inputs, result, evidence)
            possible = faults(inputs)
            fault = list(possible)[int(rng.integers(len(possible)))]
            result = with_fault(evidence, possible[fault])
            if result is not None:
                share = max(share_by_tensor(evidence, side_of(inputs, result)).values())
                wrong[fault].append((share, str(case)))
    return {
        "schema": SCHEMA,
        "kind": "judge-calibration",
        "environment": environment(),
        "cases": cases,
        "distinct_shapes": len(seen),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "right": {name: shares.summary() for name, shares in right.items()},
        "faults": fault_rows(wrong),
    }


def fault_rows(found: dict[str, list[tuple[float, str]]]) -> dict[str, dict[str, Any]]:
    """Of each fault's shares and case lines what the measurement keeps."""
    return {
        name: {
            "cases": len(shares),
            "caught": sum(share > 1.0 for share, _ in shares),
            "smallest_share": _json_number(min(shares)[0]),
            "median_share": _json_number(float(np.median([share for share, _ in shares]))),
            "smallest_at": min(shares)[1],
        }
        for name, shares in sorted(found.items())
    }


class Shares:
    """What one right kernel used of the bounds over all of its cases; judge: the suite's."""

    def __init__(self, judge: Callable[..., Verdict]) -> None:
        self._judge = judge
        self.cases = 0
        self.alarms: list[str] = []
        self.largest: dict[str, float] = defaultdict(float)
        self.place: dict[str, str] = {}

    def add(
        self,
        line: str,
        inputs: Inputs,
        result: Result,
        evidence: object,
    ) -> None:
        verdict = self._judge(inputs, result, evidence=evidence)
        self.cases += 1
        if verdict.status.failed:
            self.alarms.append(f"{line}: {verdict.status.value}: {verdict.reason}")
        for name, share in verdict.shares.items():
            if share > self.largest[name]:
                self.largest[name] = share
                self.place[name] = line

    def summary(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "alarms": self.alarms,
            "largest_share": {name: _json_number(self.largest[name]) for name in self.place},
            "largest_at": self.place,
        }


def table(measured: dict[str, Any], statistics: tuple[str, ...] = STATISTICS) -> str:
    """The two tables of docs/tolerances.md, in Markdown."""
    lines = [
        f"| right kernel | cases | alarms | out row | out tensor | {' | '.join(statistics)} |",
        "|---|---|---|---|---|" + "---|" * len(statistics),
    ]
    for name, row in measured["right"].items():
        shares = row["largest_share"]
        cells = [_cell(shares.get(key, 0.0)) for key in ("out", "out tensor", *statistics)]
        lines.append(f"| {name} | {row['cases']} | {len(row['alarms'])} | {' | '.join(cells)} |")
    lines += [
        "",
        "| fault | cases that can show it | caught | smallest share | median share |",
        "|---|---|---|---|---|",
    ]
    for name, row in measured["faults"].items():
        shares = f"{_cell(row['smallest_share'])} | {_cell(row['median_share'])}"
        lines.append(f"| {name} | {row['cases']} | {row['caught']} | {shares} |")
    return "\n".join(lines)


def _json_number(value: float) -> float | str:
    """JSON has no infinity: a special value at the wrong place has the share "inf"."""
    return "inf" if math.isinf(value) else float(f"{value:.4g}")


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[int, int, int], dict[str, Any]],
    statistics: tuple[str, ...] = STATISTICS,
) -> int:
    """The command; measure: calibrate, of cases, shapes and seed. parser: has --cases and
    --shapes. Exit status 1 if a right kernel raised an alarm.
    """
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args(arguments)
    measured = measure(given.cases, given.shapes, given.seed)
    if given.out:
        given.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(table(measured, statistics))
    alarms = [alarm for row in measured["right"].values() for alarm in row["alarms"]]
    print(f"\n{measured['cases']} cases, {measured['seconds']} s, {len(alarms)} alarms")
    print("\n".join(alarms[:10]))
    return 1 if alarms else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a right kernel raised an alarm."""
    parser = argparse.ArgumentParser(
        prog="python -m compare.calibrate.calibrate", description=__doc__
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--shapes", type=int, default=100, help="at most this many distinct shapes")
    return command(parser, arguments, calibrate)


if __name__ == "__main__":
    sys.exit(main())
