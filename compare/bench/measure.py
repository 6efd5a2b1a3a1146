"""What every bench does with one shape: each contender first has to be right, then all are timed.

A contender's `out` is compared with the float64 oracle on some tokens and with the reference on
all; one that is wrong gets no time. Then all take turns in the same run (timing.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from compare.bench.measurement import MeasuredRow, NotMeasured
from compare.bench.timing import Contender, Method, Timing, interleaved
from compare.protocol.arrays import to_torch
from compare.protocol.timing import Launch

LARGEST_ERROR = 5e-3
"""Relative L2 distance to the oracle from which a contender counts as wrong. Rounding P and the
output to bfloat16 makes 2e-3 on these data; a block of 64 keys left out of 2,048 makes 0.17, one of
65,536 keys makes 0.03."""

ORACLE_TOKENS = 16

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Output:
    """One result as torch tensors: out [T, H, 512], lse [T, H] natural-log."""

    out: Float[Tensor, "T H Dv"]
    lse: Float32[Tensor, "T H"]


@dataclasses.dataclass(frozen=True)
class Oracle:
    """float64 results of some tokens."""

    tokens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A contender on one shape, its result compared."""

    ready: Launch
    output: Output
    rel_l2_oracle: float
    lse_oracle: float


def measure(
    case: str,
    flop: float,
    contenders: Mapping[str, Callable[[], Launch]],
    oracle: Oracle,
    references: Sequence[str],
    method: Method,
    say: Say,
    same: SameBits | None = None,
) -> tuple[list[MeasuredRow], list[NotMeasured]]:
    """Rows of every contender on one shape beside each of `references`, and what has none.

    contenders: by name how each is made ready, the references among them. The first reference has
    no row; the others are measured beside those before them. Without the first there is no row.
    same: holds all programs of JAX to the same bits.
    """
    main = references[0]
    failed: list[NotMeasured] = []
    right: dict[str, Checked] = {}
    for name in sorted(contenders, key=lambda name: name != main):  # the reference first
        try:
            checked = _check(contenders[name](), oracle, right.get(main), same)
        except Exception as error:  # a contender may fail in any way; the others go on
            failed.append(failure(case, name, error))
            say(f"{case}: {name} FAILED: {failed[-1].reason}")
            if name == main:
                return [], failed
            continue
        say(f"{case}: {name} rel L2 {checked.rel_l2_oracle:.2e} to the oracle")
        if not checked.rel_l2_oracle <= LARGEST_ERROR:  # NaN too
            reason = (
                f"wrong: rel L2 {checked.rel_l2_oracle:.2e} to the oracle where "
                f"{LARGEST_ERROR} is allowed"
            )
            failed.append(NotMeasured(case=case, name=name, reason=reason))
            if name == main:
                return [], failed
            continue
        right[name] = checked
    try:
        times = interleaved([Contender(name, c.ready.launch) for name, c in right.items()], method)
    except Exception as error:  # a fault on the GPU: no time of this shape can be trusted
        return [], [*failed, *(failure(case, name, error) for name in right)]
    short = [name for name in right if not times[name].measurable]
    failed += [
        NotMeasured(case=case, name=name, reason="too short to be told from the clock's noise")
        for name in short
    ]
    if main in short:
        return [], failed
    measured = [name for name in right if name not in short]
    rows = [
        _row(case, flop, name, right, reference, times)
        for name in measured
        for number, reference in enumerate(references)
        if reference in measured and name not in references[: number + 1]
    ]
    for row in rows:
        say(
            f"{case}: {row.name} {row.ours_us:.1f} us, {row.reference} {row.reference_us:.1f} us, "
            f"ratio {row.ratio:.3f}"
        )
    return rows, failed


def failure(case: str, name: str, error: Exception) -> NotMeasured:
    return NotMeasured(case=case, name=name, reason=f"{type(error).__name__}: {error}")


def _row(
    case: str,
    flop: float,
    name: str,
    right: Mapping[str, Checked],
    reference: str,
    times: Mapping[str, Timing],
) -> MeasuredRow:
    ours, theirs = times[name], times[reference]
    mine, other = right[name], right[reference]
    return MeasuredRow(
        case=case,
        name=name,
        ours_us=ours.median_us,
        reference=reference,
        reference_us=theirs.median_us,
        tflops=flop / ours.median_us / 1e6,
        reference_tflops=flop / theirs.median_us / 1e6,
        rel_l2_oracle=mine.rel_l2_oracle,
        reference_rel_l2_oracle=other.rel_l2_oracle,
        rel_l2_reference=rel_l2(mine.output.out, other.output.out),
        lse_oracle=mine.lse_oracle,
        lse_reference=(mine.output.lse - other.output.lse).abs().max().item(),
        ours_rounds_us=ours.rounds_us,
        reference_rounds_us=theirs.rounds_us,
    )


def _check(
    ready: Launch, oracle: Oracle, reference: Checked | None, same: SameBits | None
) -> Checked:
    output = output_of(ready.once(), oracle.out.device)
    if same is not None and ready.program is not None:
        same.check(output)
    if reference is not None:
        for name in ("out", "lse"):
            shape, wanted = getattr(output, name).shape, getattr(reference.output, name).shape
            if shape != wanted:
                raise ValueError(f"{name} has shape {list(shape)}, the reference's {list(wanted)}")
    return Checked(
        ready=ready,
        output=output,
        rel_l2_oracle=rel_l2(output.out[oracle.tokens], oracle.out),
        lse_oracle=(output.lse[oracle.tokens].double() - oracle.lse).abs().max().item(),
    )


def rel_l2(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|, in blocks of tokens that fit beside the data."""
    difference = norm = 0.0
    for a, b in zip(ours.split(256), theirs.split(256), strict=True):
        difference += (a.double() - b.double()).square().sum().item()
        norm += b.double().square().sum().item()
    return (difference / norm) ** 0.5


def oracle_tokens(count: int, device: torch.device) -> torch.Tensor:
    """Tokens spread evenly over a call of `count`."""
    some = min(ORACLE_TOKENS, count)
    return torch.linspace(0, count - 1, some).round().long().to(device)


def output_of(result: Any, device: torch.device) -> Output:
    """A result as torch tensors where the oracle's lie."""
    out, lse = (to_torch(array, str(device)) for array in (result.out, result.lse))
    return Output(out, lse)


class SameBits:
    """Holds every result that it is shown to the bits of the first one."""

    def __init__(self) -> None:
        self._first: Output | None = None

    def check(self, output: Output) -> None:
        """ValueError where out or lse have other bits than the first result's."""
        if self._first is None:
            self._first = output
            return
        for part, width in (("out", torch.int16), ("lse", torch.int32)):
            mine, theirs = (getattr(each, part).view(width) for each in (output, self._first))
            if unequal := int((mine != theirs).sum()):
                raise ValueError(f"{unequal} values of {part} have other bits than the first one's")


@functools.cache
def environment() -> dict[str, str]:
    from compare.report.environment import environment

    return environment()


def revision() -> str:
    """The commit of this code, or what MLA_CROSSCHECK_REVISION says where git doesn't know it."""
    return environment().get("revision", "unknown")


def out_file(path: Path, suite: str) -> Path:
    """The file; in a folder, SUITE-DATE-REVISION.json."""
    if path.suffix == ".json":
        return path
    date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    return path / f"{suite}-{date}-{revision()[:12]}.json"


def without_repeats(named: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Contenders by name. Raises ValueError for a name given twice."""
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two contenders are called {name!r}; each needs a name of its own")
    return dict(named)


class Progress:
    """Lines on stderr with the seconds since the start, at once: a run that is cut off shows how
    far it got.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, line: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"[{seconds:6.1f} s] {line}", file=sys.stderr, flush=True)
