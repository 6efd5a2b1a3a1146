"""Speed of sparse prefill against FlashMLA: `python -m compare.tools.bench --out FILE.json`.

On each shape every contender first has to be right: its `out` is compared with the float64 oracle
on some tokens and with the reference on all. Then all are timed in the same run, taking turns
(bench_timing). The file is written anew after each shape.

Exit status: 0 all were measured; 1 a contender was wrong or failed; 2 the words are off; 3 the
reference doesn't run here.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Both frameworks share one GPU: neither may take all of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

from compare.tools import bench_sides as sides
from compare.tools.bench_timing import Contender, Method, Timing, interleaved
from compare.tools.golden_record import REVISION_VARIABLE
from compare.tools.measurement import MeasuredRow, Measurement, NotMeasured

LARGEST_ERROR = 5e-3
"""Relative L2 distance to the oracle from which a contender counts as wrong. Rounding P and the
output to bfloat16 makes 2e-3 on these data; a block of 64 keys left out of 2,048 makes 0.17."""

ORACLE_TOKENS = 16

TORCH_SIDES: dict[str, Callable[[sides.Data], sides.Ready]] = {
    "flash_mla": sides.ready_flash_mla,
    "torch": sides.ready_torch,
}
JAX_SIDES = ("pallas", "xla")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A contender on one shape, its result compared."""

    ready: sides.Ready
    rel_l2_oracle: float
    lse_oracle: float
    rel_l2_reference: float = 0.0
    lse_reference: float = 0.0


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(words)
    try:
        shapes = _shapes(options.shapes)
        functions = _functions(options)
        method = Method(launches=options.launches, rounds=options.rounds)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    out = _out(Path(options.out))
    say = _Progress()
    reason = _reference_reason(options.reference)
    if reason is not None:
        print(f"bench: {options.reference} doesn't run here: {reason}", file=sys.stderr)
        return 3
    measurement = Measurement(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        revision=_revision(),
        environment=_environment(),
        method={
            **dataclasses.asdict(method),
            "clock": "host wall clock, slope between two batch sizes, contenders interleaved",
            "data": sides.DATA,
            "seed": options.seed,
            "oracle_tokens": ORACLE_TOKENS,
        },
    )
    with ThreadPoolExecutor(options.threads) as pool:
        programs = _compile(pool, functions, shapes, say)
        for shape in shapes:
            say(f"{shape.case}: data")
            data = sides.make_data(shape, options.seed, device)
            rows, failed = measure(shape, data, functions, programs, options.reference, method, say)
            measurement = dataclasses.replace(
                measurement,
                rows=(*measurement.rows, *rows),
                not_measured=(*measurement.not_measured, *failed),
            )
            measurement.write(out)
            del data
    print(measurement.table())
    print(f"written to {out}")
    return 1 if measurement.not_measured else 0


def measure(
    shape: sides.Shape,
    data: sides.Data,
    names: Mapping[str, sides.JaxFunction | None],
    programs: Mapping[tuple[str, sides.Shape], Future[Any]],
    reference: str,
    method: Method,
    say: Callable[[str], None],
) -> tuple[list[MeasuredRow], list[NotMeasured]]:
    """Rows of every contender in `names` on one shape, and those that have none.

    names: the reference is one of them; a JAX function each, or None for one of TORCH_SIDES.
    """
    case = str(shape.case)
    failed: list[NotMeasured] = []
    oracle = _oracle(data)
    right: dict[str, Checked] = {}
    expected: sides.Output | None = None
    for name in sorted(names, key=lambda name: name != reference):  # the reference first
        try:
            if names[name] is None:
                ready = TORCH_SIDES[name](data)
            else:
                ready = sides.ready_jax(programs[name, shape].result(), data)
            output = ready.once()
            if name == reference:
                expected = output
            checked = _check(ready, output, oracle, expected)
        except Exception as error:  # a contender may fail in any way; the others go on
            failed.append(_failure(case, name, error))
            say(f"{case}: {name} FAILED: {failed[-1].reason}")
            if name == reference:
                return [], failed
            continue
        say(
            f"{case}: {name} rel L2 {checked.rel_l2_oracle:.2e} to the oracle, "
            f"{checked.rel_l2_reference:.2e} to {reference}"
        )
        if not checked.rel_l2_oracle <= LARGEST_ERROR:  # NaN too
            reason = (
                f"wrong: rel L2 {checked.rel_l2_oracle:.2e} to the oracle where "
                f"{LARGEST_ERROR} is allowed"
            )
            failed.append(NotMeasured(case=case, name=name, reason=reason))
            continue
        right[name] = checked
    if reference not in right:
        return [], failed
    contenders = [Contender(name, checked.ready.launch) for name, checked in right.items()]
    try:
        times = interleaved(contenders, method)
    except Exception as error:  # a fault on the GPU: no time of this shape can be trusted
        return [], [*failed, *(_failure(case, name, error) for name in right)]
    short = [name for name in right if not times[name].measurable]
    failed += [
        NotMeasured(case=case, name=name, reason="too short to be told from the clock's noise")
        for name in short
    ]
    if reference in short:
        return [], failed
    rows = [
        _row(shape, name, right, reference, times)
        for name in right
        if name != reference and name not in short
    ]
    for row in rows:
        say(
            f"{case}: {row.name} {row.ours_us:.1f} us, {reference} {row.reference_us:.1f} us, "
            f"ratio {row.ratio:.3f}"
        )
    return rows, failed


def _failure(case: str, name: str, error: Exception) -> NotMeasured:
    return NotMeasured(case=case, name=name, reason=f"{type(error).__name__}: {error}")


def _row(
    shape: sides.Shape,
    name: str,
    right: Mapping[str, Checked],
    reference: str,
    times: Mapping[str, Timing],
) -> MeasuredRow:
    ours, theirs = times[name], times[reference]
    return MeasuredRow(
        case=str(shape.case),
        name=name,
        ours_us=ours.median_us,
        reference=reference,
        reference_us=theirs.median_us,
        tflops=shape.case.flop / ours.median_us / 1e6,
        reference_tflops=shape.case.flop / theirs.median_us / 1e6,
        rel_l2_oracle=right[name].rel_l2_oracle,
        reference_rel_l2_oracle=right[reference].rel_l2_oracle,
        rel_l2_reference=right[name].rel_l2_reference,
        lse_oracle=right[name].lse_oracle,
        lse_reference=right[name].lse_reference,
        ours_rounds_us=ours.rounds_us,
        reference_rounds_us=theirs.rounds_us,
    )


@dataclasses.dataclass(frozen=True)
class _Oracle:
    tokens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def _oracle(data: sides.Data) -> _Oracle:
    """float64 on tokens spread evenly over the call."""
    import torch_ref

    count = min(ORACLE_TOKENS, len(data.q))
    tokens = torch.linspace(0, len(data.q) - 1, count).round().long().to(data.q.device)
    result = torch_ref.sparse_prefill_oracle(*data.arrays, data.sm_scale, rows=tokens)
    return _Oracle(tokens, result.out, result.lse)


def _check(
    ready: sides.Ready, output: sides.Output, oracle: _Oracle, expected: sides.Output | None
) -> Checked:
    assert expected is not None, "the reference comes first"
    for name in ("out", "lse"):
        shape, wanted = getattr(output, name).shape, getattr(expected, name).shape
        if shape != wanted:
            raise ValueError(f"{name} has shape {list(shape)}, the reference's {list(wanted)}")
    return Checked(
        ready=ready,
        rel_l2_oracle=_rel_l2(output.out[oracle.tokens], oracle.out),
        lse_oracle=(output.lse[oracle.tokens].double() - oracle.lse).abs().max().item(),
        rel_l2_reference=_rel_l2(output.out, expected.out),
        lse_reference=(output.lse - expected.lse).abs().max().item(),
    )


def _rel_l2(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|, in blocks of tokens that fit beside the data."""
    difference = norm = 0.0
    for a, b in zip(ours.split(256), theirs.split(256), strict=True):
        difference += (a.double() - b.double()).square().sum().item()
        norm += b.double().square().sum().item()
    return (difference / norm) ** 0.5


def _compile(
    pool: ThreadPoolExecutor,
    functions: Mapping[str, sides.JaxFunction | None],
    shapes: Sequence[sides.Shape],
    say: Callable[[str], None],
) -> dict[tuple[str, sides.Shape], Future[Any]]:
    """All programs, compiled before anything is timed: compiling would disturb the launches."""
    programs = {
        (name, shape): pool.submit(sides.compile_jax, function, shape)
        for shape in shapes
        for name, function in functions.items()
        if function is not None
    }
    for number, ((name, shape), program) in enumerate(programs.items(), 1):
        error = program.exception()
        what = "compiled" if error is None else f"FAILED ({type(error).__name__})"
        say(f"{number}/{len(programs)} {name} for {shape.case} {what}")
    return programs


def _functions(options: argparse.Namespace) -> dict[str, sides.JaxFunction | None]:
    """Every contender by name, the reference among them. Raises ValueError for a name given
    twice.
    """
    named: list[tuple[str, sides.JaxFunction | None]] = [
        (name, sides.backend(name) if name in JAX_SIDES else None)
        for name in [options.reference, *(options.candidate or ["pallas"])]
    ]
    for text in options.config:
        name, config = sides.parse_config(text)
        named.append((name, sides.configured(config)))
    named += [(Path(text).name, sides.load_function(text)) for text in options.also]
    functions = dict(named)
    if len(functions) != len(named):
        names = [name for name, _ in named]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two contenders are called {twice!r}; each needs a name of its own")
    return functions


def _reference_reason(name: str) -> str | None:
    if name != "flash_mla":
        return None
    from torch_ref.cuda.flash_mla_adapter import unsupported_reason

    return unsupported_reason()


def _shapes(texts: Sequence[str]) -> tuple[sides.Shape, ...]:
    shapes: list[sides.Shape] = []
    for text in texts or ["six"]:
        shapes += sides.SIX if text == "six" else [sides.Shape.parse(text)]
    return tuple(dict.fromkeys(shapes))


@functools.cache
def _environment() -> dict[str, str]:
    from compare.report.environment import environment

    return environment()


def _revision() -> str:
    """The commit of this code, or what MLA_CROSSCHECK_REVISION says where git doesn't know it."""
    return _environment().get("revision") or os.environ.get(REVISION_VARIABLE, "unknown")


def _out(path: Path) -> Path:
    """The file; in a folder, sparse-prefill-DATE-REVISION.json."""
    if path.suffix == ".json":
        return path
    date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    return path / f"sparse-prefill-{date}-{_revision()[:12]}.json"


class _Progress:
    """Lines on stderr with the seconds since the start, at once: a run that is cut off shows how
    far it got.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, line: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"[{seconds:6.1f} s] {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    sides_known = sorted([*TORCH_SIDES, *JAX_SIDES])
    parser = argparse.ArgumentParser(prog="python -m compare.tools.bench", description=__doc__)
    parser.add_argument("--out", required=True, help="JSON file, or the folder for it")
    parser.add_argument(
        "--shapes", nargs="+", default=[], help="six (default), or s_q,s_kv,h,d,topk"
    )
    parser.add_argument("--reference", default="flash_mla", choices=sides_known)
    parser.add_argument("--candidate", action="append", choices=sides_known, help="default: pallas")
    parser.add_argument(
        "--config", action="append", default=[], help="NAME:key=value,... of the kernel's Config"
    )
    parser.add_argument(
        "--also", action="append", default=[], help="FILE.py:FUNCTION of (q, kv, indices, sm_scale)"
    )
    parser.add_argument("--launches", type=int, default=20, help="the slope's launches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8, help="programs compiled at the same time")
    parser.add_argument("--device", default=None, help="cuda (default where there is one) or cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
