"""Measures a suite's judge: how much of its bounds right kernels use, and how far faults lie
outside.

Right kernels are `xla` as the registry has it, and models of kernels that take other liberties. The
yardstick, torch, isn't measured: its own error is the bound's unit. A fault is planted into the
oracle, one of the suite's table that the inputs can have for each case, and rounded like a result.
docs/tolerances.md shows the table of a run, which `table` writes.
"""

from __future__ import annotations

import importlib
import math
import time
from collections import defaultdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compare.judging.calibration import Calibration, planted
from compare.judging.sides import share_by_tensor
from compare.protocol.suite import Suite
from compare.protocol.verdict import Verdict
from compare.report.environment import environment
from compare.run import registry

SCHEMA = 1


def calibration_of(suite: Suite) -> Calibration:
    """What a suite gives to be measured by; ValueError where it has none."""
    if suite.calibration is None:
        raise ValueError(f"{suite.name} has no bounds that could be measured")
    return importlib.import_module(suite.calibration).CALIBRATION


def calibrate(
    suite: Suite, cases: int, shapes: int, seed: int, console: Console | None = None
) -> dict[str, Any]:
    """The measurement as plain data: for each right kernel its cases, its alarms (case lines with
    the reason) and its largest share by tensor; for each fault the cases that could show it, those
    that did, and its smallest and median share.
    """
    drawn, judge = calibration_of(suite), importlib.import_module(suite.judging)
    right = {name: Shares() for name in ("xla", *drawn.models)}
    wrong: dict[str, list[tuple[float, str]]] = defaultdict(list)
    xla = registry.find("xla", "cpu")
    # Streams of their own: a new fault changes nothing about the models.
    rng, fault_rng = (np.random.default_rng([seed, stream]) for stream in range(2))
    seen = set()
    started = time.monotonic()
    console = console or Console(stderr=True)
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        todo = drawn.cases(cases, shapes, seed)
        for line, shape, inputs in progress.track(todo, total=cases):
            evidence = judge.evidence_of(inputs)
            seen.add(shape)
            kernels = [("xla", xla.run(inputs)), drawn.run(evidence, rng)]
            for name, result in (kernel for kernel in kernels if kernel is not None):
                right[name].add(line, judge.judge(inputs, result, evidence=evidence))
            possible = list(drawn.faults(evidence))
            fault = possible[int(fault_rng.integers(len(possible)))]
            result = planted(drawn, evidence, fault)
            if result is not None:
                shares = share_by_tensor(evidence, judge.side_of(inputs, result))
                wrong[fault.label].append((max(shares.values()), line))
    return {
        "schema": SCHEMA,
        "kind": "judge-calibration",
        "suite": suite.name,
        "environment": environment(),
        "cases": cases,
        "distinct_shapes": len(seen),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "right": {name: shares.summary() for name, shares in right.items()},
        "faults": _fault_rows(wrong),
    }


def _fault_rows(wrong: dict[str, list[tuple[float, str]]]) -> dict[str, dict[str, Any]]:
    """Of each fault's shares and case lines what the measurement keeps."""
    return {
        name: {
            "cases": len(shares),
            "caught": sum(share > 1.0 for share, _ in shares),
            "smallest_share": _json_number(min(shares)[0]),
            "median_share": _json_number(float(np.median([share for share, _ in shares]))),
            "smallest_at": min(shares)[1],
        }
        for name, shares in sorted(wrong.items())
    }


class Shares:
    """What one right kernel used of the bounds over all of its cases."""

    def __init__(self) -> None:
        self.cases = 0
        self.alarms: list[str] = []
        self.largest: dict[str, float] = defaultdict(float)
        self.place: dict[str, str] = {}

    def add(self, line: str, verdict: Verdict) -> None:
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


def table(measured: dict[str, Any], statistics: tuple[str, ...]) -> str:
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
