"""How far a right decode may be from the truth. Its rows are judged as those of sparse prefill are
(judging/tolerance.py, same bounds), and where they were merged from parts by judging/parts.py.

**The flashmla profile** takes upstream's own rules by surface: FlashMLA's for dense decode on one
GPU; FlashInfer's, |x - r| <= abs + rel |r|, where one of the two results has rounded parts;
that of FlashInfer's DCP tests where ranks were merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from compare.judging.metrics import SumTolerance, Tolerance

FLASHMLA_DENSE = {
    "out": Tolerance(absolute=8e-4, relative=2.01 / 128, cosine=5e-6),
    "lse": Tolerance(absolute=1e-6, relative=8.01 / 65536, cosine=math.inf),
}
FLASHINFER = {
    "out": SumTolerance(absolute=1e-3, relative=1e-3),
    "lse": SumTolerance(absolute=1e-3, relative=1e-3),
}
FLASHINFER_FLOAT8 = {
    "out": SumTolerance(absolute=1e-2, relative=1e-2),
    "lse": SumTolerance(absolute=1e-3, relative=1e-3),
}
MERGED = {
    "out": SumTolerance(absolute=1e-2, relative=1e-2),
    "lse": SumTolerance(absolute=1e-2, relative=1e-2),
}
MERGED_FLOAT8 = {
    "out": SumTolerance(absolute=0.1, relative=0.1),
    "lse": SumTolerance(absolute=0.2, relative=0.1),
}


def tolerances(
    *, merged: bool, rounded_parts: bool, float8: bool
) -> tuple[str, Mapping[str, Tolerance]]:
    """Whose tests, and their rule for each tensor. merged: ranks were; rounded_parts: one of the
    results has parts that were rounded to bfloat16; float8: the keys are."""
    if merged:
        return "FlashInfer's DCP tests", MERGED_FLOAT8 if float8 else MERGED
    if rounded_parts:
        return "FlashInfer's tests", FLASHINFER_FLOAT8 if float8 else FLASHINFER
    return "FlashMLA's tests", FLASHMLA_DENSE
