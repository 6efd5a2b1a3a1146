"""The known faults of sparse attention over DCP ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, Sample, possible_faults
from compare.judging.rows import OracleRows, oracle_rows
from compare.judging.shared_faults import (
    LSE_TIMES_LN_2,
    NEIGHBOUR_TOKENS,
    OUT_ALL_ZERO,
    heads_rotated,
)
from torch_ref import Variant


def _empty_ranks_count(_: Any, sample: Sample) -> OracleRows:
    import torch_ref

    parts = [
        dataclasses.replace(part, lse=part.lse.masked_fill(part.lse == -torch.inf, 0.0))
        for part in sample.evidence.witness.parts(sample.tokens)
    ]
    return oracle_rows(torch_ref.merge_oracle(parts), max_logits=False)


FAULTS = (
    Fault(
        name="empty-rank-lse-zero",
        sentence="a rank that holds none of a token's chosen keys gives it lse 0, which the merge "
        "takes for a key of score 0",
        possible=lambda inputs: bool(inputs.shards),
        rows=_empty_ranks_count,
    ),
    heads_rotated(Variant(head_shift=1)),
    *NEIGHBOUR_TOKENS,
    LSE_TIMES_LN_2,
    OUT_ALL_ZERO,
)


def faults_of(evidence: Evidence[Any]) -> Iterator[Fault]:
    """Those that are possible with a case's inputs."""
    return possible_faults(FAULTS, evidence.inputs)
