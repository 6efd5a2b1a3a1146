"""The frame of the bench commands: their options, the order of their work, and the exit status.

Exit status: 0 all were measured; 1 a contender was wrong or failed; 2 the words are off; 3 the
reference doesn't run here.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from compare.bench.measure import (
    ORACLE_TOKENS,
    Oracle,
    Progress,
    Ready,
    Say,
    environment,
    measure,
    out_file,
    report_compilation,
    revision,
    without_repeats,
)
from compare.bench.measurement import MeasuredRow, Measurement, MemoryRow, NotMeasured, TransferRow
from compare.bench.timing import Method

JAX_SIDES = ("pallas", "xla")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a bench works with once its words are read and its reference is known to run."""

    options: argparse.Namespace
    method: Method
    device: str
    say: Say


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What one part of a bench adds to the lists of its Measurement."""

    rows: Sequence[MeasuredRow] = ()
    not_measured: Sequence[NotMeasured] = ()
    transfers: Sequence[TransferRow] = ()
    memory: Sequence[MemoryRow] = ()

    def added_to(self, measurement: Measurement) -> Measurement:
        lists = [field.name for field in dataclasses.fields(self)]
        return dataclasses.replace(
            measurement,
            **{name: (*getattr(measurement, name), *getattr(self, name)) for name in lists},
        )


def run_bench[Words](
    bench: str,
    suite: str,
    options: argparse.Namespace,
    *,
    read: Callable[[argparse.Namespace], tuple[Words, Method]],
    reference_reason: Callable[[str], str | None],
    facts: Mapping[str, Any],
    parts: Callable[[Words, Run], Iterator[Found]],
) -> int:
    """A whole bench; returns the exit status. The file is written anew after each part.

    bench: how its messages begin. suite: how the file's name begins in a folder. read: raises
    ValueError for words that are off. reference_reason: why a reference can't run here. facts: of
    the method, beside those of every bench.
    """
    try:
        words, method = read(options)
    except ValueError as error:
        print(f"{bench}: {error}", file=sys.stderr)
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    out = out_file(Path(options.out), suite)
    say = Progress()
    reason = reference_reason(options.reference)
    if reason is not None:
        print(f"{bench}: {options.reference} doesn't run here: {reason}", file=sys.stderr)
        return 3
    measurement = Measurement(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        revision=revision(),
        environment=environment(),
        method={
            **dataclasses.asdict(method),
            "clock": "host wall clock, slope between two batch sizes, contenders interleaved",
            **facts,
            "seed": options.seed,
            "oracle_tokens": ORACLE_TOKENS,
        },
    )
    for found in parts(words, Run(options=options, method=method, device=device, say=say)):
        measurement = found.added_to(measurement)
        measurement.write(out)
    print(measurement.table())
    print(f"written to {out}")
    return 1 if measurement.not_measured else 0


def method_of(options: argparse.Namespace) -> Method:
    """Raises ValueError."""
    return Method(launches=options.launches, rounds=options.rounds)


def shapes_of[Shape](
    texts: Sequence[str], known: Mapping[str, Sequence[Shape]], parse: Callable[[str], Shape]
) -> tuple[Shape, ...]:
    """The shapes that are named or written out, each once; all `known` ones where there is no
    text.
    """
    shapes: list[Shape] = []
    for text in texts or known:
        shapes += known[text] if text in known else [parse(text)]
    return tuple(dict.fromkeys(shapes))


def contenders_of[Function](
    options: argparse.Namespace,
    *,
    backend: Callable[[str], Function],
    configured: Callable[[str], tuple[str, Function]],
) -> dict[str, Function | None]:
    """Every contender by name, the reference among them; None for one of torch's. Raises
    ValueError.
    """
    named: list[tuple[str, Function | None]] = [
        (name, backend(name) if name in JAX_SIDES else None)
        for name in [options.reference, *(options.candidate or ["pallas"])]
    ]
    named += [configured(text) for text in options.config]
    named += [(Path(text).name, load_function(text)) for text in options.also]
    return without_repeats(named)


def load_function(text: str) -> Any:
    """The function of FILE.py:FUNCTION. Raises ValueError."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"--also {text}: write FILE.py:FUNCTION; there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"--also {text}: {file} has no function {name!r}")
    return getattr(module, name)


class _Shape(Protocol):
    @property
    def case(self) -> object: ...
    @property
    def flop(self) -> int: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides[Shape, Data, Function]:
    """How contenders are made ready: those of torch by name, JAX functions through a program that
    is compiled for a shape.
    """

    make_data: Callable[[Shape, int, str], Data]
    oracle: Callable[[Data], Oracle]
    torch: Mapping[str, Callable[[Data], Ready]]
    compile_jax: Callable[[Function, Shape], Any]
    ready_jax: Callable[[Any, Data], Ready]


def side_by_side[Shape: _Shape, Data, Function](
    run: Run,
    shapes: Sequence[Shape],
    functions: Mapping[str, Function | None],
    sides: Sides[Shape, Data, Function],
    of_shape: Callable[[Shape], tuple[Mapping[str, Function | None], Sequence[str]]],
) -> Iterator[Found]:
    """All contenders on one shape after the other; of_shape: those of a shape, and its references.

    All programs are compiled before anything is timed: compiling would disturb the launches.
    """
    with ThreadPoolExecutor(run.options.threads) as pool:
        programs = {
            (name, shape): pool.submit(sides.compile_jax, function, shape)
            for shape in shapes
            for name, function in functions.items()
            if function is not None
        }
        report_compilation(programs, run.say)
        for shape in shapes:
            yield _on_one_shape(run, shape, *of_shape(shape), sides, programs)


def _on_one_shape[Shape: _Shape, Data, Function](
    run: Run,
    shape: Shape,
    functions: Mapping[str, Function | None],
    references: Sequence[str],
    sides: Sides[Shape, Data, Function],
    programs: Mapping[tuple[str, Shape], Future[Any]],
) -> Found:
    """The data of a shape are gone when it returns."""
    run.say(f"{shape.case}: data")
    data = sides.make_data(shape, run.options.seed, run.device)

    def ready_jax(program: Future[Any]) -> Ready:
        return sides.ready_jax(program.result(), data)

    contenders = {
        name: functools.partial(sides.torch[name], data)
        if function is None
        else functools.partial(ready_jax, programs[name, shape])
        for name, function in functions.items()
    }
    rows, failed = measure(
        str(shape.case), shape.flop, contenders, sides.oracle(data), references, run.method, run.say
    )
    return Found(rows=rows, not_measured=failed)


def flash_mla_reason(reference: str) -> str | None:
    """Why FlashMLA's sparse prefill can't be the reference here; None if it can, or isn't."""
    if reference != "flash_mla":
        return None
    from torch_ref.cuda.flash_mla_adapter import unsupported_reason

    return unsupported_reason()


def parser_of(bench: str, description: str | None, *, shapes: str) -> argparse.ArgumentParser:
    """The options that every bench begins with; shapes: what --shapes takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m compare.bench.{bench}", description=description
    )
    parser.add_argument("--out", required=True, help="JSON file, or the folder for it")
    parser.add_argument("--shapes", nargs="+", default=[], help=shapes)
    return parser


def add_contenders(parser: argparse.ArgumentParser, torch_sides: Sequence[str], also: str) -> None:
    """The options that contenders_of reads; also: what --also takes."""
    known = sorted([*torch_sides, *JAX_SIDES])
    parser.add_argument("--reference", default="flash_mla", choices=known)
    parser.add_argument("--candidate", action="append", choices=known, help="default: pallas")
    parser.add_argument(
        "--config", action="append", default=[], help="NAME:key=value,... of the kernel's Config"
    )
    parser.add_argument("--also", action="append", default=[], help=also)


def add_method(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--launches", type=int, default=20, help="the slope's launches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8, help="programs compiled at the same time")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=None, help="cuda (default where there is one) or cpu")
