"""Speed of DCP decode: `python -m compare.tools.bench_decode --out FILE.json`.

Shapes are batches on one rank of a group. The reference is FlashMLA as its adapter runs it: whole
requests with one rank and one query length, else flattened, one row per token. Where that is whole,
the flattened form, which is what DCP needs of it, is measured beside it and is a second reference.
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

from compare.tools import bench_decode_sides as sides
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
from compare.tools.bench_sides import config_words
from compare.tools.bench_timing import Method
from compare.tools.measurement import Measurement

JAX_SIDES = ("pallas", "xla")
TORCH_SIDES: dict[str, Callable[[sides.Data], Ready]] = {
    **{name: functools.partial(sides.ready_adapter, name) for name in sides.ADAPTERS},
    "torch": sides.ready_eager,
}


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(words)
    try:
        shapes = _shapes(options.shapes)
        makers = _makers(options)
        method = Method(launches=options.launches, rounds=options.rounds)
    except ValueError as error:
        print(f"bench_decode: {error}", file=sys.stderr)
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    out = out_file(Path(options.out), "dcp-decode")
    say = Progress()
    reason = _reference_reason(options.reference)
    if reason is not None:
        print(f"bench_decode: {options.reference} doesn't run here: {reason}", file=sys.stderr)
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
        programs = _compile(pool, makers, shapes, say)
        for shape in shapes:
            say(f"{shape.case}: data")
            data = sides.make_data(shape, options.seed, device)
            names, references = _of_shape(makers, options.reference, shape)
            rows, failed = measure(
                shape.case,
                shape.flop,
                _contenders(shape, data, names, programs),
                _oracle(data),
                references,
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


def _of_shape(
    makers: Mapping[str, sides.JaxMaker | None], reference: str, shape: sides.Shape
) -> tuple[dict[str, sides.JaxMaker | None], list[str]]:
    """The contenders of a shape and its references. A flattened form is one of its own only where
    the adapter wouldn't flatten by itself."""
    names = dict(makers)
    references = [reference]
    if shape.flattened:
        for name in [name for name in names if name.endswith(sides.FLATTENED)]:
            del names[name]
    elif reference + sides.FLATTENED in TORCH_SIDES and max(shape.query_lens) > 1:
        references.append(reference + sides.FLATTENED)
        names[references[-1]] = None
    return names, references


def _contenders(
    shape: sides.Shape,
    data: sides.Data,
    makers: Mapping[str, sides.JaxMaker | None],
    programs: Mapping[tuple[str, sides.Shape], Future[Any]],
) -> dict[str, Callable[[], Ready]]:
    """How each is made ready: a JAX program, or None for one of TORCH_SIDES."""
    return {
        name: functools.partial(TORCH_SIDES[name], data)
        if maker is None
        else functools.partial(_ready_jax, programs[name, shape], data)
        for name, maker in makers.items()
    }


def _ready_jax(program: Future[Any], data: sides.Data) -> Ready:
    return sides.ready_jax(program.result(), data)


def _oracle(data: sides.Data) -> Oracle:
    """float64 on tokens spread evenly over the batch."""
    import torch_ref

    tokens = oracle_tokens(len(data.q), data.q.device)
    shape = data.shape
    lens, starts, totals = (
        torch.tensor(words, dtype=torch.int32)
        for words in (shape.seq_lens, shape.query_start_loc, shape.total_lens)
    )
    result = torch_ref.dcp_decode_oracle(
        *data.arrays,
        lens,
        starts,
        sides.SM_SCALE,
        total_lens=totals,
        dcp_rank=sides.RANK,
        dcp_world=shape.world,
        rows=tokens,
    )
    return Oracle(tokens, result.out, result.lse)


def _compile(
    pool: ThreadPoolExecutor,
    makers: Mapping[str, sides.JaxMaker | None],
    shapes: Sequence[sides.Shape],
    say: Callable[[str], None],
) -> dict[tuple[str, sides.Shape], Future[Any]]:
    """All programs, compiled before anything is timed."""
    programs = {
        (name, shape): pool.submit(sides.compile_jax, maker, shape)
        for shape in shapes
        for name, maker in makers.items()
        if maker is not None
    }
    report_compilation(programs, say)
    return programs


def _makers(options: argparse.Namespace) -> dict[str, sides.JaxMaker | None]:
    """Every contender by name, the reference among them. Raises ValueError."""
    named: list[tuple[str, sides.JaxMaker | None]] = [
        (name, sides.backend(name) if name in JAX_SIDES else None)
        for name in [options.reference, *(options.candidate or ["pallas"])]
    ]
    for text in options.config:
        from jax_impl.decode.kernel_sm90.config import Config

        name, values = config_words(text, Config)
        named.append((name, sides.backend("pallas", Config(**values))))
    named += [(Path(text).name, sides.load_maker(text)) for text in options.also]
    return without_repeats(named)


def _reference_reason(name: str) -> str | None:
    return sides.adapter_reason(name) if name in sides.ADAPTERS else None


def _shapes(texts: Sequence[str]) -> tuple[sides.Shape, ...]:
    known = {"seven": sides.SEVEN, "ragged": sides.RAGGED}
    shapes: list[sides.Shape] = []
    for text in texts or known:
        shapes += known[text] if text in known else [sides.Shape.parse(text)]
    return tuple(dict.fromkeys(shapes))


def _parser() -> argparse.ArgumentParser:
    sides_known = sorted([*TORCH_SIDES, *JAX_SIDES])
    parser = argparse.ArgumentParser(
        prog="python -m compare.tools.bench_decode", description=__doc__
    )
    parser.add_argument("--out", required=True, help="JSON file, or the folder for it")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        help="seven and ragged (default), or b,q,h,l[,world], q and l numbers or LEAST-MOST",
    )
    parser.add_argument("--reference", default="flash_mla", choices=sides_known)
    parser.add_argument("--candidate", action="append", choices=sides_known, help="default: pallas")
    parser.add_argument(
        "--config", action="append", default=[], help="NAME:key=value,... of the kernel's Config"
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        help="FILE.py:FUNCTION of (shape) -> (operands, function of (operands, q, kv_cache, "
        "block_table) -> (out, lse))",
    )
    parser.add_argument("--launches", type=int, default=20, help="the slope's launches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8, help="programs compiled at the same time")
    parser.add_argument("--device", default=None, help="cuda (default where there is one) or cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
