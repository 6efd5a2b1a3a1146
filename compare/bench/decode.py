"""Speed of DCP decode: `python -m compare.bench.decode --out FILE.json`.

Shapes are batches on one rank of a group. The reference is FlashMLA as its adapter runs it: whole
requests with one rank and one query length, else flattened, one row per token. Where that is whole,
the flattened form, which is what DCP needs of it, is measured beside it and is a second reference.
How contenders are checked and timed: bench_measure. The file is written anew after each shape.

Exit status: 0 all were measured; 1 a contender was wrong or failed; 2 the words are off; 3 the
reference doesn't run here.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

# Both frameworks share one GPU: neither may take all of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

from compare.bench import decode_sides as sides
from compare.bench.command import (
    Found,
    Run,
    Sides,
    add_contenders,
    add_device,
    add_method,
    contenders_of,
    method_of,
    parser_of,
    run_bench,
    shapes_of,
    side_by_side,
)
from compare.bench.measure import Oracle, Ready, oracle_tokens
from compare.bench.sides import config_words
from compare.bench.timing import Method

TORCH_SIDES: dict[str, Callable[[sides.Data], Ready]] = {
    **{name: functools.partial(sides.ready_adapter, name) for name in sides.ADAPTERS},
    "torch": sides.ready_eager,
}

Words = tuple[tuple[sides.Shape, ...], dict[str, sides.JaxMaker | None]]
"""The shapes, and the contenders by name: what makes a JAX program, or None for one of
TORCH_SIDES."""


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return run_bench(
        "bench_decode",
        "dcp-decode",
        _parser().parse_args(words),
        read=_read,
        reference_reason=_reference_reason,
        facts={"data": sides.DATA},
        parts=_parts,
    )


def _read(options: argparse.Namespace) -> tuple[Words, Method]:
    """Raises ValueError."""
    known = {"seven": sides.SEVEN, "ragged": sides.RAGGED}
    shapes = shapes_of(options.shapes, known, sides.Shape.parse)
    makers = contenders_of(options, backend=sides.backend, configured=_configured)
    return (shapes, makers), method_of(options)


def _configured(text: str) -> tuple[str, sides.JaxMaker]:
    from jax_impl.decode.kernel_sm90.config import Config

    name, values = config_words(text, Config)
    return name, sides.backend("pallas", Config(**values))


def _reference_reason(name: str) -> str | None:
    return sides.adapter_reason(name) if name in sides.ADAPTERS else None


def _parts(words: Words, run: Run) -> Iterator[Found]:
    shapes, makers = words
    ready = Sides(
        make_data=sides.make_data,
        oracle=_oracle,
        torch=TORCH_SIDES,
        compile_jax=sides.compile_jax,
        ready_jax=sides.ready_jax,
    )
    of_shape = functools.partial(_of_shape, makers, run.options.reference)
    return side_by_side(run, shapes, makers, ready, of_shape)


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


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "bench_decode",
        __doc__,
        shapes="seven and ragged (default), or b,q,h,l[,world], q and l numbers or LEAST-MOST",
    )
    add_contenders(
        parser,
        list(TORCH_SIDES),
        also="FILE.py:FUNCTION of (shape) -> (operands, function of (operands, q, kv_cache, "
        "block_table) -> (out, lse))",
    )
    add_method(parser)
    add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
