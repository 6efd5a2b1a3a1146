"""Names of decode's faults, from the tensors alone: what each would make of these inputs."""

from __future__ import annotations

from compare.judging.diagnosis import explanations, sample_of, shown_by_special_values
from compare.judging.evidence import Evidence
from compare.judging.faults import hypotheses
from compare.judging.result_view import ResultView
from compare.judging.special import SpecialValues
from compare.protocol.verdict import Diagnosis
from compare.suites.dcp_decode.evidence import DecodeWitness
from compare.suites.dcp_decode.faults import FAULTS

_ORACLE_RUNS = 24


def diagnose(
    evidence: Evidence[DecodeWitness],
    view: ResultView,
    suspects: list[int],
    special: SpecialValues,
) -> tuple[Diagnosis, ...]:
    """The faults that a failing candidate's tensors show; () where none explains them.

    suspects: tokens to look at first. A hypothesis that another one explains as well is flagged in
    its sentence.
    """
    shown = shown_by_special_values(FAULTS, special)
    padded = [t for t in special.suspects if evidence.witness.keys.request[t] < 0]
    if padded:
        shown.append(
            Diagnosis(
                name="padded-rows-not-empty",
                sentence=f"row {padded[0]} belongs to no request and has a result; padded rows "
                "have out 0 and lse -inf",
            )
        )
    sample = sample_of(evidence, suspects, oracle_runs=_ORACLE_RUNS)
    if sample is not None:
        possible = hypotheses(FAULTS, sample, view, evidence.inputs)
        shown += explanations(sample, view, possible)
    return tuple(shown)
