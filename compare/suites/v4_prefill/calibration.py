"""What calibration draws of V4 prefill: random cases, models of right kernels, and faults.

Right kernels are `xla` as the registry has it, by its own plan, and models of kernels that take
other liberties, over the keys that each token sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from compare.judging.calibration import Calibration, Drawn
from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, Sample
from compare.judging.model_kernels import Freedom, run, run_in_ranges
from compare.judging.rows import OracleRows
from compare.protocol.inputs import Result
from compare.suites.v4_prefill.call import V4PrefillResult
from compare.suites.v4_prefill.case import V4PrefillCase
from compare.suites.v4_prefill.faults import faults_of, right_rows
from compare.suites.v4_prefill.make import v4_prefill_inputs
from torch_ref.v4.variants import V4Variant

MODELS = {
    "blocks of 64, ascending": Freedom(),
    "shuffled blocks of 32, lazy rescale (2^8)": Freedom(block=32, order="shuffled", lazy=8.0),
    "truncated, fast math, P rounded twice": Freedom(
        truncates=True, fast_math=True, rounds_twice=True
    ),
}
RANGES = "ranges in bfloat16"
SPLITS = (16, 64)
"""Slots of a range that a model splits a token's list into."""

_SEQ = (1, 3, 17, 40, 70, 130, 300)
_Q = (0, 1, 1, 2, 3, 5)
_HEADS = (1, 2, 3, 8)
_DATA = ("normal", "flat", "peaked", "exact")
_SINKS = ("none", "none", "mixed", "zero", "-inf", "inf", "nan", 3.5, -80.0)


def random_cases(cases: int, shapes: int, seed: int) -> Iterator[Drawn]:
    """`cases` small random cases over `shapes` batches: one to three requests of up to 5 tokens,
    those without tokens too, with and without compressed entries, short and long windows and lists,
    both formats, images, every kind of sink and data, slots outside every length NaN or not.
    """
    rng = np.random.default_rng(seed)

    def one_of(values):
        return values[int(rng.integers(len(values)))]

    batches = []
    for _ in range(shapes):
        requests, ratio = int(rng.integers(1, 4)), one_of((1, 2, 4, 4, 128))
        seq = tuple(one_of(_SEQ) for _ in range(requests))
        q = tuple(min(one_of(_Q), length) for length in seq)
        batches.append(
            {
                "seq": seq,
                "q": q if any(q) else (1, *q[1:]),
                "ratio": ratio,
                "topk": 64 if ratio == 1 else one_of((3, 20, 64)),
                "window": one_of((1, 8, 24, 128)),
                "page": one_of((16, 64)),
                "h": one_of(_HEADS),
                "format": one_of(("v4-fp8", "v4-fp8", "bf16")),
                "start": one_of((0, 0, 5)),
                "max_image": one_of((0, 0, 3)),
            }
        )
    for _ in range(cases):
        batch, data = one_of(batches), one_of(_DATA)
        case = V4PrefillCase(
            **batch,
            images=_images(batch) if rng.random() < 0.5 else (),
            plan=one_of(("fixed", "fixed", "alone")),
            sink=one_of(("none", "-inf")) if data == "exact" else one_of(_SINKS),
            data=data,
            poison=bool(rng.random() < 0.3),
            seed=int(rng.integers(1 << 32)),
        )
        case.check()
        yield str(case), tuple(batch.items()), v4_prefill_inputs(case)


def _images(batch: dict[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """The last tokens of each request as an image, where such are allowed."""
    return tuple(
        (request, length - min(queries, batch["max_image"]), length - 1)
        for request, (length, queries) in enumerate(zip(batch["seq"], batch["q"], strict=True))
        if min(queries, batch["max_image"])
    )


def _run(evidence: Evidence[Any], rng: np.random.Generator) -> tuple[str, Result]:
    """A model of a right kernel, one that splits lists where there is no sink."""
    call = evidence.witness.call
    if call.attn_sink is None and rng.random() < 0.3:
        slots = SPLITS[int(rng.integers(len(SPLITS)))]
        result = run_in_ranges(call, slots, Freedom(), rng)
        return RANGES, dataclasses.replace(_result(vars(result)), parts="bfloat16")
    name = list(MODELS)[int(rng.integers(len(MODELS)))]
    return name, _result(vars(run(call, MODELS[name], rng)))


def _result(tensors: Mapping[str, Any]) -> V4PrefillResult:
    return V4PrefillResult(out=tensors["out"], max_logits=tensors["max_logits"], lse=tensors["lse"])


def _contract(sample: Sample, fault: Fault) -> OracleRows:
    """Right rows by the way that a fault's are made."""
    if isinstance(fault.variant, V4Variant):
        return sample.once(right_rows)
    return sample.evidence.oracle(sample.tokens)


CALIBRATION = Calibration(
    cases=random_cases,
    models=(*MODELS, RANGES),
    run=_run,
    faults=faults_of,
    contract=_contract,
    result=_result,
    statistics=("max_logits", "lse"),
)
