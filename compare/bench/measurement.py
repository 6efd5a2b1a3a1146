"""A measurement as a file: the source of every number of speed or memory in this project's texts.

A file has the lists that were measured: `rows` and `not_measured` always, `transfers` and `memory`
where there are any.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compare.protocol.tensor_file import write_bytes

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
class TransferRow:
    """A contender that moves bytes and computes next to nothing, timed without a reference.

    Bytes are those that it has to read and write, by the formats; time as in MeasuredRow.
    """

    case: str
    name: str
    us: float
    bytes_read: int
    bytes_written: int
    rounds_us: tuple[float, ...]

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, read and written together."""
        return (self.bytes_read + self.bytes_written) / self.us / 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Device memory of one contender on one case, in bytes.

    planned_workspace_bytes: of the largest chunk of the plan; list_bytes: of its index lists;
    result_bytes: of the whole result. xla_*: XLA's analysis of the program. measured_peak_bytes:
    the device's peak over what was in use before the program ran, so temporaries and results; None
    where the device doesn't tell (a CPU).
    """

    case: str
    name: str
    planned_workspace_bytes: int
    list_bytes: int
    result_bytes: int
    xla_argument_bytes: int
    xla_output_bytes: int
    xla_temp_bytes: int
    measured_peak_bytes: int | None

    @property
    def planned_bytes(self) -> int:
        """What the path may need beside its arguments."""
        return self.planned_workspace_bytes + self.list_bytes + self.result_bytes


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
    transfers: tuple[TransferRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()

    def as_json(self) -> dict[str, Any]:
        words = {"schema": SCHEMA, "kind": "speed", **dataclasses.asdict(self)}
        words["rows"] = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in self.rows]
        words["transfers"] = [
            {**dataclasses.asdict(row), "gb_per_s": row.gb_per_s} for row in self.transfers
        ]
        words["memory"] = [
            {**dataclasses.asdict(row), "planned_bytes": row.planned_bytes} for row in self.memory
        ]
        for name in ("transfers", "memory"):
            if not words[name]:
                del words[name]
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
        text = _aligned(lines)
        if self.transfers:
            text += _aligned([("case", "contender", "us", "GB/s read + written")] + [
                (row.case, row.name, f"{row.us:.1f}", f"{row.gb_per_s:.0f}")
                for row in self.transfers
            ])  # fmt: skip
        if self.memory:
            names = ("peak", "planned", "workspace", "lists", "result", "XLA temp + output")
            text += _aligned([("case", "contender", *(f"{name} MiB" for name in names))] + [
                (row.case, row.name, *map(_mib, (
                    row.measured_peak_bytes, row.planned_bytes, row.planned_workspace_bytes,
                    row.list_bytes, row.result_bytes, row.xla_temp_bytes + row.xla_output_bytes,
                )))
                for row in self.memory
            ])  # fmt: skip
        text += [f"not measured: {no.name} on {no.case}: {no.reason}" for no in self.not_measured]
        return "\n".join(text)


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.2f}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest word."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
