"""A measurement of speed as a file: the source of every such number in this project's texts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare.tools.tensor_file import write_bytes

SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One contender on one case beside the reference, timed in the same run.

    ratio: reference time over ours and nothing else; above 1 ours is faster. Times in microseconds,
    medians over the rounds, whose times stand in *_rounds_us. rel_l2_*: relative L2 distance of
    `out`, to the float64 oracle on some tokens, and to the reference on all. lse_*: largest
    absolute distance.
    """

    case: str
    name: str
    ours_us: float
    reference: str
    reference_us: float
    tflops: float
    reference_tflops: float
    rel_l2_oracle: float
    reference_rel_l2_oracle: float
    rel_l2_reference: float
    lse_oracle: float
    lse_reference: float
    ours_rounds_us: tuple[float, ...]
    reference_rounds_us: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return self.reference_us / self.ours_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotMeasured:
    """A contender that has no time on a case, and why, in a sentence."""

    case: str
    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A run of the bench. date: UTC, ISO. method: launches, rounds, data and seed, as numbers and
    sentences."""

    date: str
    revision: str
    environment: Mapping[str, str]
    method: Mapping[str, Any]
    rows: tuple[MeasuredRow, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()

    def as_json(self) -> dict[str, Any]:
        words = {"schema": SCHEMA, "kind": "speed", **dataclasses.asdict(self)}
        words["rows"] = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in self.rows]
        return words

    def write(self, path: Path) -> None:
        """Replaces the file, so that it is whole after every case."""
        write_bytes(path, (json.dumps(self.as_json(), indent=1) + "\n").encode())

    def table(self) -> str:
        """The rows as text, one line each."""
        head = ("case", "contender", "us", "reference us", "ratio", "TFLOPS", "rel L2 oracle / ref")
        lines: list[tuple[str, ...]] = [head]
        for row in self.rows:
            lines.append(
                (
                    row.case,
                    row.name,
                    f"{row.ours_us:.1f}",
                    f"{row.reference_us:.1f}",
                    f"{row.ratio:.3f}",
                    f"{row.tflops:.0f}",
                    f"{row.rel_l2_oracle:.2e} / {row.rel_l2_reference:.2e}",
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = [
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        text += [f"not measured: {no.name} on {no.case}: {no.reason}" for no in self.not_measured]
        return "\n".join(text)
