"""Speed of sparse prefill against FlashMLA: `python -m compare.tools.bench --out FILE.json`.

How contenders are checked and timed: bench_measure. The file is written anew after each shape.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Both frameworks share one GPU: neither may take all of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

from compare.tools import bench_sides as sides
from compare.tools.bench_measure import (
    ORACLE_TOKENS,
    Oracle,
    Progress,
    Ready,
    environment,
    measure,
    oracle_tokens,
    out_file,
    report_compilation,
    revision,
    without_repeats,
)
from compare.tools.bench_timing import Method
from compare.tools.measurement import Measurement

TORCH_SIDES: dict[str, Callable[[sides.Data], Ready]] = {
    "flash_mla": sides.ready_flash_mla,
    "torch": sides.ready_eager,
}
JAX_SIDES = ("pallas", "xla")


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
    out = out_file(Path(options.out), "sparse-prefill")
    say = Progress()
    reason = _reference_reason(options.reference)
    if reason is not None:
        print(f"bench: {options.reference} doesn't run here: {reason}", file=sys.stderr)
        return 3
    measurement = Measurement(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        revision=revision(),
        environment=environment(),
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
            rows, failed = measure(
                str(shape.case),
                shape.case.flop,
                _contenders(shape, data, functions, programs),
                _oracle(data),
                [options.reference],
                method,
                say,
            )
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


def _contenders(
    shape: sides.Shape,
    data: sides.Data,
    names: Mapping[str, sides.JaxFunction | None],
    programs: Mapping[tuple[str, sides.Shape], Future[Any]],
) -> dict[str, Callable[[], Ready]]:
    """How each is made ready: a JAX function, or None for one of TORCH_SIDES."""
    return {
        name: functools.partial(TORCH_SIDES[name], data)
        if function is None
        else functools.partial(_ready_jax, programs[name, shape], data)
        for name, function in names.items()
    }


def _ready_jax(program: Future[Any], data: sides.Data) -> Ready:
    return sides.ready_jax(program.result(), data)


def _oracle(data: sides.Data) -> Oracle:
    """float64 on tokens spread evenly over the call."""
    import torch_ref

    tokens = oracle_tokens(len(data.q), data.q.device)
    result = torch_ref.sparse_prefill_oracle(*data.arrays, data.sm_scale, rows=tokens)
    return Oracle(tokens, result.out, result.lse)


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
    report_compilation(programs, say)
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
    return without_repeats(named)


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
