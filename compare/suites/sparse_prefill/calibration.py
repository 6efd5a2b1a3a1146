"""What calibration draws of sparse prefill: random cases, models of right kernels, and faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from compare.judging.attention_call import SparsePrefillResult
from compare.judging.attention_faults import faults_of
from compare.judging.calibration import Calibration, Drawn
from compare.judging.evidence import Evidence
from compare.judging.model_kernels import Freedom, run
from compare.protocol.inputs import Result
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.make import sparse_prefill_inputs

MODELS = {
    "blocks of 64, ascending": Freedom(),
    "descending, lazy rescale (2^8)": Freedom(order="descending", lazy=8.0),
    "shuffled blocks of 32, lazy rescale (2^8)": Freedom(block=32, order="shuffled", lazy=8.0),
    "P rounded twice": Freedom(rounds_twice=True, lazy=8.0),
    "sums truncated as on tensor cores": Freedom(truncates=True),
    "truncated, fast math, P rounded twice": Freedom(
        truncates=True, fast_math=True, rounds_twice=True
    ),
}
"""Every kernel that is right by the contract must stay under 1 on all of them."""

_TOKENS = (1, 2, 3, 4)
_HEADS = (1, 2, 3, 8, 16, 24)
_WIDTHS = (1, 2, 7, 33, 64, 96, 128, 200, 256)
_KV_ROWS = (8, 9, 33, 64, 200, 300)
_DATA = ("flashmla", "normal", "flat", "peaked", "exact")
_SINKS = ("none", "none", "mixed", "mixed", "zero", "-inf", "inf", "nan", "3.5", "-80", "80", "1e4")
_SCALES = ("auto", "auto", "auto", "auto", 1.0, 0.02, -0.05, 0.0)


def random_cases(cases: int, shapes: int, seed: int) -> Iterator[Drawn]:
    """`cases` small random cases of at most `shapes` distinct shapes (T, H, D, K, S): all kinds of
    data, sinks (NaN, infinite and overflowing ones too), ragged lengths, holes, empty rows and
    repeats, a tenth of them with the row's slots all on one, two or four keys ("with indices
    modulo").
    """
    rng = np.random.default_rng(seed)

    def one_of(values):
        return values[rng.integers(len(values))]

    pool: list[dict[str, Any]] = [
        {
            "s_q": one_of(_TOKENS),
            "h": one_of(_HEADS),
            "d": one_of((512, 576)),
            "topk": one_of(_WIDTHS),
            "s_kv": one_of(_KV_ROWS),
        }
        for _ in range(shapes)
    ]
    for number in range(cases):
        shape, data = one_of(pool), one_of(_DATA)
        exact = data == "exact"
        case = SparsePrefillCase(
            **shape,
            data=data,
            sink=one_of(("none", "-inf")) if exact else _number(one_of(_SINKS)),
            sm_scale="auto" if exact else one_of(_SCALES),
            length=one_of(("none", "ragged", "ragged")),
            invalid=one_of((0.0, 0.0, 0.1, 0.5)),
            order=one_of(("random", "sorted", "dup")),
            empty_rows=int(rng.integers(shape["s_q"] + 1)) if rng.random() < 0.2 else 0,
            poison=bool(rng.random() < 0.5),
            seed=number,
        )
        case.check()
        inputs = sparse_prefill_inputs(case)
        keys = 0
        if not exact and not case.poison and rng.random() < 0.2:
            keys = one_of((1, 2, 4))
            named = np.where(inputs.indices > 0, inputs.indices % keys, inputs.indices)
            inputs = dataclasses.replace(inputs, indices=named.astype(np.int32))
        line = f"{case} with indices modulo {keys}" if keys else str(case)
        yield line, (*inputs.q.shape, *inputs.indices.shape, *inputs.kv.shape), inputs


def _run(evidence: Evidence[Any], rng: np.random.Generator) -> tuple[str, Result] | None:
    """A model of a right kernel; they take positive scales only."""
    if evidence.inputs.sm_scale <= 0.0:
        return None
    name = list(MODELS)[int(rng.integers(len(MODELS)))]
    return name, run(evidence.inputs, MODELS[name], rng)


def _number(word: str) -> str | float:
    """A sink as the case line's key reads it: its words stay words, numbers become numbers."""
    return word if word in ("none", "mixed", "zero", "-inf", "inf", "nan") else float(word)


CALIBRATION = Calibration(
    cases=random_cases,
    models=tuple(MODELS),
    run=_run,
    faults=faults_of,
    contract=lambda sample, _: sample.evidence.oracle(sample.tokens),
    result=lambda tensors: SparsePrefillResult(
        out=tensors["out"], max_logits=tensors["max_logits"], lse=tensors["lse"]
    ),
    statistics=("max_logits", "lse"),
)
