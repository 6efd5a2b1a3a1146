"""What a suite gives to the calibration of its judge: random cases, right kernels, and faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from compare.judging.device import to_numpy
from compare.judging.elements import round_to_bfloat16
from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, Sample
from compare.judging.rows import OracleRows
from compare.protocol.inputs import Inputs, Result

Drawn = tuple[str, Hashable, Inputs]
"""A case in words, what cases of one shape have in common, and the inputs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """cases(count, shapes, seed): small random cases of at most so many shapes.

    models: names of right kernels that take other liberties than `xla`, of which `run` picks one
    that takes these inputs: its name and result, None where none does. faults: those that a case
    can have. contract: right rows as a fault's are made, for they may differ in their last bits.
    result: out, max_logits and lse as the suite's result. statistics: what tables show beside out.
    """

    cases: Callable[[int, int, int], Iterator[Drawn]]
    models: tuple[str, ...]
    run: Callable[[Evidence[Any], np.random.Generator], tuple[str, Result] | None]
    faults: Callable[[Evidence[Any]], Iterator[Fault]]
    contract: Callable[[Sample, Fault], OracleRows]
    result: Callable[[Mapping[str, np.ndarray]], Result]
    statistics: tuple[str, ...]


def planted(calibration: Calibration, evidence: Evidence[Any], fault: Fault) -> Result | None:
    """What a kernel with this fault and no rounding but the last would give; None where that is
    what the contract gives too, bit for bit: the inputs can't show the fault.
    """
    sample = Sample(evidence=evidence, tokens=np.arange(evidence.num_tokens))
    nan_score = evidence.witness.kinds(sample.tokens).nan_score
    wrong = _rounded(fault.tensors(sample), nan_score)
    for rows in (calibration.contract(sample, fault), sample.contract):
        right = _rounded(rows, nan_score)
        if all(_equal(right[name], wrong[name]) for name in right):
            return None
    return calibration.result(wrong)


def _rounded(rows: OracleRows, nan_score: np.ndarray) -> dict[str, np.ndarray]:
    """As a kernel gives them; max_logits of rows with a NaN, which aren't compared, are 0."""
    out = torch.from_numpy(np.ascontiguousarray(rows.out))
    with np.errstate(over="ignore"):
        return {
            "out": to_numpy(round_to_bfloat16(out)),
            "max_logits": np.where(nan_score, 0.0, rows.max_logits).astype(np.float32),
            "lse": rows.lse.astype(np.float32),
        }


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == ml_dtypes.bfloat16:
        a, b = a.astype(np.float32), b.astype(np.float32)
    return np.array_equal(a, b, equal_nan=True)
