"""The random cases that the judge's bounds are measured on, and the faults planted into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.device import to_numpy
from compare.judging.elements import round_to_bfloat16
from compare.judging.evidence import Evidence
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.make import sparse_prefill_inputs

_TOKENS = (1, 2, 3, 4)
_HEADS = (1, 2, 3, 8, 16, 24)
_WIDTHS = (1, 2, 7, 33, 64, 96, 128, 200, 256)
_KV_ROWS = (8, 9, 33, 64, 200, 300)
_DATA = ("flashmla", "normal", "flat", "peaked", "exact")
_SINKS = ("none", "none", "mixed", "mixed", "zero", "-inf", "inf", "nan", "3.5", "-80", "80", "1e4")
_SCALES = ("auto", "auto", "auto", "auto", 1.0, 0.02, -0.05, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class CalibrationCase:
    """A case line, whether its indices were then made to name `keys` keys only (0: as drawn), and
    the inputs that come of it.
    """

    line: str
    keys: int
    inputs: SparsePrefillInputs

    def __str__(self) -> str:
        return f"{self.line} with indices modulo {self.keys}" if self.keys else self.line


def random_cases(cases: int, shapes: int, seed: int) -> Iterator[CalibrationCase]:
    """`cases` small random cases of at most `shapes` distinct shapes (T, H, D, K, S): all kinds of
    data, sinks (NaN, infinite and overflowing ones too), ragged lengths, holes, empty rows and
    repeats, a tenth of them with the row's slots all on one, two or four keys.
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
        yield CalibrationCase(str(case), keys, inputs)


def faults(inputs: SparsePrefillInputs) -> dict[str, dict]:
    """The faults that can happen with these inputs, as fields of torch_ref's Variant, by slug."""
    found: dict[str, dict] = {
        "lse-base-2": {"lse_base2": True},
        "scale-twice": {"scale_power": 2},
        "max-before-scaling": {"max_logits": "unscaled"},
        "heads-rotated": {"head_shift": 1},
        "wrong-value-columns": {"v_offset": 64},
        "empty-lse-minus-inf": {"empty_lse": "-inf"},
        "minus-one-wraps": {"index": "minus_one_wraps"},
    }
    if inputs.attn_sink is not None:
        found |= {
            "sink-omitted": {"sink": "omitted"},
            "sink-in-lse": {"sink": "in_lse"},
            "sink-times-sm-scale": {"sink": "times_scale"},
        }
    if inputs.topk_length is not None:
        found |= {
            "length-ignored": {"length": "ignored"},
            "length-off-by-one": {"length": "plus_one"},
            "length-off-by-one (short)": {"length": "minus_one"},
        }
    return found


def with_fault(evidence: Evidence, fields: dict) -> SparsePrefillResult | None:
    """What a kernel with this fault and no rounding but the last would give; None where that is
    what the contract gives too, bit for bit: the inputs can't show the fault.
    """
    from torch_ref import Variant

    tokens = np.arange(evidence.num_tokens)
    right, wrong = evidence.oracle(tokens), evidence.oracle(tokens, Variant(**fields))
    nan_score = evidence.witness.keys.rows(tokens).nan_score
    results = []
    for rows in (right, wrong):
        with np.errstate(over="ignore"):
            max_logits = np.where(nan_score, 0.0, rows.max_logits).astype(np.float32)
            out = to_numpy(round_to_bfloat16(torch.from_numpy(rows.out)))
            results.append((out, max_logits, rows.lse.astype(np.float32)))
    same = [_equal(a, b) for a, b in zip(*results, strict=True)]
    if all(same):
        return None
    out, max_logits, lse = results[1]
    return SparsePrefillResult(out=out, max_logits=max_logits, lse=lse)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == ml_dtypes.bfloat16:
        a, b = a.astype(np.float32), b.astype(np.float32)
    return np.array_equal(a, b, equal_nan=True)


def _number(word: str) -> str | float:
    """A sink as the case line's key reads it: its words stay words, numbers become numbers."""
    return word if word in ("none", "mixed", "zero", "-inf", "inf", "nan") else float(word)
