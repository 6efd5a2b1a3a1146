"""Speed and memory of the V4 prefill path: `python -m compare.bench.v4 --out FILE.json`.

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
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Both frameworks share one GPU: neither may take all of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from compare.bench import v4_memory as bench_v4_memory
from compare.bench import v4_sides as sides
from compare.bench.command import (
    Found,
    Run,
    add_device,
    add_method,
    flash_mla_reason,
    method_of,
    parser_of,
    run_bench,
    shapes_of,
)
from compare.bench.measure import Oracle, Ready, failure, measure, oracle_tokens, report_compilation
from compare.bench.measurement import MemoryRow, NotMeasured, TransferRow
from compare.bench.timing import Contender, Method, interleaved
from compare.bench.v4_shape import FIVE, Shape

Programs = Mapping[tuple[str, Shape], Future[Any]]


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(words)
    return run_bench(
        "bench_v4",
        "v4-prefill",
        options,
        read=_read,
        reference_reason=_reference_reason,
        facts={
            "data": sides.DATA,
            "planning": sides.PLANNING,
            "reference": f"{options.reference}: attention alone on a gathered workspace",
            "memory": "each program once in a process of its own: the device's peak over what was "
            "in use before",
        },
        parts=_parts,
    )


def _read(options: argparse.Namespace) -> tuple[tuple[Shape, ...], Method]:
    """Raises ValueError."""
    shapes = shapes_of(options.shapes, {"five": FIVE}, Shape.parse)
    method = method_of(options)
    for name in ("threads", "children"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}; accepted are 1 and more")
    return shapes, method


def _reference_reason(name: str) -> str | None:
    return flash_mla_reason(name)


def _parts(shapes: Sequence[Shape], run: Run) -> Iterator[Found]:
    if not run.options.no_memory:
        # Before anything is timed: these processes would disturb the launches.
        yield _memory(shapes, run)
    backend = run.options.backend
    with ThreadPoolExecutor(run.options.threads) as pool:
        programs = {
            (backend + part, shape): pool.submit(compiler, shape, backend)
            for shape in shapes
            for part, compiler in sides.COMPILERS.items()
        }
        report_compilation(programs, run.say)
    for shape in shapes:
        yield _on_one_shape(run, shape, programs)


def _on_one_shape(run: Run, shape: Shape, programs: Programs) -> Found:
    run.say(f"{shape.case}: data")
    data = sides.make_data(shape, run.options.seed, run.device)
    given = sides.gathered(data)
    rows, failed = measure(
        shape.case,
        shape.flop,
        _contenders(shape, data, given, run.options, programs),
        _oracle(data),
        [_reference_name(run.options)],
        run.method,
        run.say,
    )
    transfers: list[TransferRow] = []
    name = run.options.backend + sides.GATHER
    try:
        row = _transfer(shape, name, programs[name, shape], data, given, run.method)
        transfers.append(row)
        run.say(f"{shape.case}: {name} {row.us:.1f} us, {row.gb_per_s:.0f} GB/s")
    except Exception as error:  # as in bench_measure: it may fail in any way
        failed.append(failure(shape.case, name, error))
        run.say(f"{shape.case}: {name} FAILED: {failed[-1].reason}")
    return Found(rows=rows, not_measured=failed, transfers=transfers)


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


def _memory(shapes: Sequence[Shape], run: Run) -> Found:
    """Of the whole path and the fused one, some processes at a time: no clock is looked at."""
    options = run.options
    with ThreadPoolExecutor(options.children) as pool:
        asked = {
            (shape, part): pool.submit(
                bench_v4_memory.ask,
                shape,
                options.backend,
                fused=part == sides.FUSED,
                seed=options.seed,
                device=run.device,
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
            run.say(f"{shape.case}: memory of {name} measured")
        except Exception as error:  # the others go on
            failed.append(failure(shape.case, f"{name} (memory)", error))
            run.say(f"{shape.case}: memory of {name} FAILED: {failed[-1].reason}")
    return Found(memory=rows, not_measured=failed)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "bench_v4",
        __doc__,
        shapes="five (default), or requests,tokens,context,h,ratio,topk; topk 0 with ratio 1",
    )
    parser.add_argument("--backend", default="pallas", choices=("pallas", "xla"))
    parser.add_argument("--reference", default="flash_mla", choices=sorted(sides.REFERENCES))
    parser.add_argument("--no-memory", action="store_true", help="speed alone")
    add_method(parser)
    parser.add_argument("--children", type=int, default=4, help="processes that measure memory")
    add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
