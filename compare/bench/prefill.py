"""Speed of sparse prefill against FlashMLA: `python -m compare.bench.prefill --out FILE.json`.

How contenders are checked and timed: bench_measure. The file is written anew after each shape.

Exit status: 0 all were measured; 1 a contender was wrong or failed; 2 the words are off; 3 the
reference doesn't run here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence

# Both frameworks share one GPU: neither may take all of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from compare.bench import sides as sides
from compare.bench.command import (
    Found,
    Run,
    Sides,
    add_contenders,
    add_device,
    add_method,
    contenders_of,
    flash_mla_reason,
    method_of,
    parser_of,
    run_bench,
    shapes_of,
    side_by_side,
)
from compare.bench.measure import Oracle, Ready, oracle_tokens
from compare.bench.timing import Method

TORCH_SIDES: dict[str, Callable[[sides.Data], Ready]] = {
    "flash_mla": sides.ready_flash_mla,
    "torch": sides.ready_eager,
}

Words = tuple[tuple[sides.Shape, ...], dict[str, sides.JaxFunction | None]]
"""The shapes, and the contenders by name: a JAX function, or None for one of TORCH_SIDES."""


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return run_bench(
        "bench",
        "sparse-prefill",
        _parser().parse_args(words),
        read=_read,
        reference_reason=_reference_reason,
        facts={"data": sides.DATA},
        parts=_parts,
    )


def _read(options: argparse.Namespace) -> tuple[Words, Method]:
    """Raises ValueError."""
    shapes = shapes_of(options.shapes, {"six": sides.SIX}, sides.Shape.parse)
    functions = contenders_of(options, backend=sides.backend, configured=_configured)
    return (shapes, functions), method_of(options)


def _configured(text: str) -> tuple[str, sides.JaxFunction]:
    name, config = sides.parse_config(text)
    return name, sides.configured(config)


def _reference_reason(name: str) -> str | None:
    return flash_mla_reason(name)


def _parts(words: Words, run: Run) -> Iterator[Found]:
    shapes, functions = words
    ready = Sides(
        make_data=sides.make_data,
        oracle=_oracle,
        torch=TORCH_SIDES,
        compile_jax=sides.compile_jax,
        ready_jax=sides.ready_jax,
    )
    references = [run.options.reference]
    return side_by_side(run, shapes, functions, ready, lambda _: (functions, references))


def _oracle(data: sides.Data) -> Oracle:
    """float64 on tokens spread evenly over the call."""
    import torch_ref

    tokens = oracle_tokens(len(data.q), data.q.device)
    result = torch_ref.sparse_prefill_oracle(*data.arrays, data.sm_scale, rows=tokens)
    return Oracle(tokens, result.out, result.lse)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("bench", __doc__, shapes="six (default), or s_q,s_kv,h,d,topk")
    add_contenders(parser, list(TORCH_SIDES), also="FILE.py:FUNCTION of (q, kv, indices, sm_scale)")
    add_method(parser)
    add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
