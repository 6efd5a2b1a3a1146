"""Speed and memory of the V4 prefill path: `python -m compare.tools.bench_v4 --out FILE.json`.

Contenders of a backend: BACKEND, the whole of v4_prefill, and BACKEND-fused, both planned when they
are compiled; BACKEND-attention, sparse prefill on a gathered workspace; BACKEND-gather, both caches
into a workspace, in bytes a second. The reference is FlashMLA's sparse prefill on that workspace:
its time has neither gather nor lists in it. How contenders are checked and timed: bench_measure;
besides, all of a backend have to give the same bits. Memory, by processes of its own:
bench_v4_memory. The file is written anew after each shape.

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

from compare.tools import bench_v4_memory
from compare.tools import bench_v4_sides as sides
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
)
from compare.tools.bench_timing import Contender, Method, interleaved
from compare.tools.bench_v4_shape import FIVE, Shape
from compare.tools.measurement import Measurement, MemoryRow, NotMeasured, TransferRow

Programs = Mapping[tuple[str, Shape], Future[Any]]


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(words)
    try:
        shapes = _shapes(options.shapes)
        method = Method(launches=options.launches, rounds=options.rounds)
        for name in ("threads", "children"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} {getattr(options, name)}; accepted are 1 and more")
    except ValueError as error:
        print(f"bench_v4: {error}", file=sys.stderr)
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    out = out_file(Path(options.out), "v4-prefill")
    say = Progress()
    reason = _reference_reason(options.reference)
    if reason is not None:
        print(f"bench_v4: {options.reference} doesn't run here: {reason}", file=sys.stderr)
        return 3
    measurement = Measurement(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        revision=revision(),
        environment=environment(),
        method={
            **dataclasses.asdict(method),
            "clock": "host wall clock, slope between two batch sizes, contenders interleaved",
            "data": sides.DATA,
            "planning": sides.PLANNING,
            "reference": f"{options.reference}: attention alone on a gathered workspace",
            "memory": "each program once in a process of its own: the device's peak over what was "
            "in use before",
            "seed": options.seed,
            "oracle_tokens": ORACLE_TOKENS,
        },
    )
    if not options.no_memory:
        # Before anything is timed: these processes would disturb the launches.
        memory, failed = _memory(shapes, options, device, say)
        measurement = dataclasses.replace(measurement, memory=memory, not_measured=failed)
        measurement.write(out)
    with ThreadPoolExecutor(options.threads) as pool:
        programs = {
            (options.backend + part, shape): pool.submit(compiler, shape, options.backend)
            for shape in shapes
            for part, compiler in sides.COMPILERS.items()
        }
        report_compilation(programs, say)
    for shape in shapes:
        measurement = _with_shape(measurement, shape, options, device, programs, method, say)
        measurement.write(out)
    print(measurement.table())
    print(f"written to {out}")
    return 1 if measurement.not_measured else 0


def _with_shape(
    measurement: Measurement,
    shape: Shape,
    options: argparse.Namespace,
    device: str,
    programs: Programs,
    method: Method,
    say: Callable[[str], None],
) -> Measurement:
    say(f"{shape.case}: data")
    data = sides.make_data(shape, options.seed, device)
    given = sides.gathered(data)
    rows, failed = measure(
        shape.case,
        shape.flop,
        _contenders(shape, data, given, options, programs),
        _oracle(data),
        [_reference_name(options)],
        method,
        say,
    )
    transfers: list[TransferRow] = []
    name = options.backend + sides.GATHER
    try:
        transfers.append(_transfer(shape, name, programs[name, shape], data, given, method))
        say(f"{shape.case}: {name} {transfers[-1].us:.1f} us, {transfers[-1].gb_per_s:.0f} GB/s")
    except Exception as error:  # as in bench_measure: it may fail in any way
        failed.append(_failure(shape.case, name, error))
        say(f"{shape.case}: {name} FAILED: {failed[-1].reason}")
    return dataclasses.replace(
        measurement,
        rows=(*measurement.rows, *rows),
        not_measured=(*measurement.not_measured, *failed),
        transfers=(*measurement.transfers, *transfers),
    )


def _contenders(
    shape: Shape,
    data: sides.Data,
    given: sides.Gathered,
    options: argparse.Namespace,
    programs: Programs,
) -> dict[str, Callable[[], Ready]]:
    same = sides.SameBits()

    def ready(name: str, make: Callable[[Any, Any], Ready], arguments: Any) -> Ready:
        return same.checked(name, make(programs[name, shape].result(), arguments))

    makers = {
        sides.WHOLE: (sides.ready_path, data),
        sides.FUSED: (sides.ready_path, data),
        sides.ATTENTION: (sides.ready_attention, given),
    }
    return {
        _reference_name(options): functools.partial(sides.REFERENCES[options.reference], given),
        **{
            options.backend + part: functools.partial(ready, options.backend + part, *maker)
            for part, maker in makers.items()
        },
    }


def _reference_name(options: argparse.Namespace) -> str:
    return options.reference + sides.ATTENTION


def _transfer(
    shape: Shape,
    name: str,
    program: Future[Any],
    data: sides.Data,
    given: sides.Gathered,
    method: Method,
) -> TransferRow:
    """Raises ValueError for a wrong workspace, or for no measurable time."""
    launch = sides.check_gather(program.result(), data, given.workspace)
    timing = interleaved([Contender(name, launch)], method)[name]
    if not timing.measurable:
        raise ValueError("too short to be told from the clock's noise")
    read, written = shape.gather_bytes
    return TransferRow(
        case=shape.case,
        name=name,
        us=timing.median_us,
        bytes_read=read,
        bytes_written=written,
        rounds_us=timing.rounds_us,
    )


def _oracle(data: sides.Data) -> Oracle:
    """float64 on tokens spread evenly over the batch, its keys read off the caches one by one."""
    import torch_ref

    tokens = oracle_tokens(len(data.q), data.q.device)
    call = torch_ref.flat_v4_call(**data.reference_arguments)
    result = torch_ref.sparse_prefill_oracle(
        data.q, call.kv, call.indices, sides.SM_SCALE, topk_length=call.topk_length, rows=tokens
    )
    return Oracle(tokens, result.out, result.lse)


def _memory(
    shapes: Sequence[Shape],
    options: argparse.Namespace,
    device: str,
    say: Callable[[str], None],
) -> tuple[tuple[MemoryRow, ...], tuple[NotMeasured, ...]]:
    """Of the whole path and the fused one, some processes at a time: no clock is looked at."""
    with ThreadPoolExecutor(options.children) as pool:
        asked = {
            (shape, part): pool.submit(
                bench_v4_memory.ask,
                shape,
                options.backend,
                fused=part == sides.FUSED,
                seed=options.seed,
                device=device,
            )
            for shape in shapes
            for part in (sides.WHOLE, sides.FUSED)
        }
    rows: list[MemoryRow] = []
    failed: list[NotMeasured] = []
    for (shape, part), answer in asked.items():
        name = options.backend + part
        try:
            rows.append(answer.result())
            say(f"{shape.case}: memory of {name} measured")
        except Exception as error:  # the others go on
            failed.append(_failure(shape.case, f"{name} (memory)", error))
            say(f"{shape.case}: memory of {name} FAILED: {failed[-1].reason}")
    return tuple(rows), tuple(failed)


def _failure(case: str, name: str, error: Exception) -> NotMeasured:
    return NotMeasured(case=case, name=name, reason=f"{type(error).__name__}: {error}")


def _reference_reason(name: str) -> str | None:
    if name != "flash_mla":
        return None
    from torch_ref.cuda.flash_mla_adapter import unsupported_reason

    return unsupported_reason()


def _shapes(texts: Sequence[str]) -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    for text in texts or ["five"]:
        shapes += FIVE if text == "five" else [Shape.parse(text)]
    return tuple(dict.fromkeys(shapes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m compare.tools.bench_v4", description=__doc__)
    parser.add_argument("--out", required=True, help="JSON file, or the folder for it")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        help="five (default), or requests,tokens,context,h,ratio,topk; topk 0 with ratio 1",
    )
    parser.add_argument("--backend", default="pallas", choices=("pallas", "xla"))
    parser.add_argument("--reference", default="flash_mla", choices=sorted(sides.REFERENCES))
    parser.add_argument("--no-memory", action="store_true", help="speed alone")
    parser.add_argument("--launches", type=int, default=20, help="the slope's launches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8, help="programs compiled at the same time")
    parser.add_argument("--children", type=int, default=4, help="processes that measure memory")
    parser.add_argument("--device", default=None, help="cuda (default where there is one) or cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
