"""Names of the V4 prefill path's faults: from the tensors alone, or from a wrong stage."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int64

from compare.judging import attention_faults
from compare.judging.diagnosis import explanations, sample_of
from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, Hypothesis, Sample, hypotheses, possible_faults
from compare.judging.plans import PlanChunk
from compare.judging.result_view import ResultView
from compare.judging.rows import OracleRows
from compare.judging.special import SpecialValues
from compare.protocol.verdict import Diagnosis
from compare.suites.v4_prefill.evidence import V4Witness
from compare.suites.v4_prefill.faults import FAULTS

if TYPE_CHECKING:
    from torch_ref.v4.variants import Through

_ORACLE_RUNS = 45


def diagnose(
    evidence: Evidence[V4Witness],
    view: ResultView,
    suspects: list[int],
    special: SpecialValues,
    plan: tuple[PlanChunk, ...],
    *,
    path: bool,
) -> tuple[Diagnosis, ...]:
    """The faults that a failing candidate's tensors show; () where none explains them.

    plan: the one that it ran, as far as that is known. path: whether the faults of the stages
    before the attention are possible too. Suspects and rivals as for sparse prefill.
    """
    shown = []
    if special.other_inf_at_empty:
        shown.append(
            Diagnosis(
                name="empty-lse-minus-inf",
                sentence=f"{special.other_inf_at_empty} rows without a key have lse -inf; sparse "
                "prefill has +inf there",
            )
        )
    sample = sample_of(evidence, suspects, oracle_runs=_ORACLE_RUNS)
    if sample is None:
        return tuple(shown)
    possible = [
        *hypotheses(attention_faults.FAULTS, sample, view, evidence.witness.call),
        *path_hypotheses(evidence, sample, plan, attention_alone=not path),
    ]
    shown += explanations(sample, view, possible)
    if not shown and special.nan_where_finite:
        shown.append(
            Diagnosis(
                name="nan-where-finite",
                sentence="NaN although every key that the token sees is finite: perhaps something "
                "else is read, such as what lies outside of every length, where NaN may stand",
            )
        )
    return tuple(shown)


def path_hypotheses(
    evidence: Evidence[V4Witness],
    sample: Sample,
    plan: tuple[PlanChunk, ...],
    *,
    attention_alone: bool = False,
) -> Iterator[Hypothesis]:
    """What the tensors would be after each fault of the path, where it changes a sampled token's
    keys: as one of the workspace's rows, and as one of what is read.
    """
    tokens = sample.tokens
    for fault in possible_faults(FAULTS, evidence.inputs):
        if attention_alone and fault.stage != "attention":
            continue
        for through in ("workspace", "cache"):
            if fault.variant.possible(through) and _changes(evidence, fault, plan, tokens, through):
                yield _hypothesis(evidence, fault, plan, tokens, through)


def _hypothesis(
    evidence: Evidence[V4Witness],
    fault: Fault,
    plan: tuple[PlanChunk, ...],
    tokens: Int64[np.ndarray, " n"],
    through: Through,
) -> Hypothesis:
    @functools.cache
    def rows() -> tuple[OracleRows, Bool[np.ndarray, " n"]]:
        return evidence.witness.deviation(tokens, fault.variant, plan, through=through)

    return Hypothesis(
        name=fault.name,
        sentence=fault.words,
        rows=lambda: rows()[0],
        silent=lambda: rows()[1],
        by_value=True,
    )


def _changes(
    evidence: Evidence[V4Witness],
    fault: Fault,
    plan: tuple[PlanChunk, ...],
    tokens: Int64[np.ndarray, " n"],
    through: Through,
) -> bool:
    """Whether a fault gives some token other keys or reads them otherwise."""
    from torch_ref.v4.variants import RIGHT, variant_keys

    inputs, variant = evidence.witness.arguments, fault.variant
    if variant.reading != "right":
        return True
    for token in tokens.tolist():
        keys = variant_keys(inputs, variant, plan, token, through=through)
        right = variant_keys(inputs, RIGHT, plan, token, through="cache")
        if keys.shape != right.shape or bool((keys != right).any()):
            return True
    return False
