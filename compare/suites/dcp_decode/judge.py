"""The judge of DCP decode: one rank's call, or all ranks merged, which must be the one call over
all keys. Shapes and dtypes, special values, then numbers, three ways, as for sparse prefill; what
decode has besides is in tolerance.py.
"""

from __future__ import annotations

import math

from compare.judging.attention_call import PARTS, SparsePrefillResult
from compare.judging.contract import Contract
from compare.judging.evidence import Evidence
from compare.judging.parts import EXACT_MERGED_LSE_ULPS, MERGE_ULPS
from compare.judging.result_view import FormFault, ResultView, form_fault
from compare.judging.sides import Side
from compare.judging.tolerance import check_profile
from compare.judging.verdicts import Remarks, refusal, verdict_on
from compare.protocol.verdict import Verdict
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.diagnosis import diagnose
from compare.suites.dcp_decode.evidence import DecodeWitness, evidence_of
from compare.suites.dcp_decode.tolerance import FLASHMLA_DENSE, tolerances

__all__ = ["evidence_of", "judge", "side_of"]

_VALUE_WIDTH = 512


def judge(
    inputs: DcpDecodeInputs,
    candidate: DcpDecodeResult,
    reference: DcpDecodeResult | None = None,
    *,
    profile: str = "calibrated",
    evidence: Evidence[DecodeWitness] | None = None,
) -> Verdict:
    """Judges a candidate's result on these inputs.

    Where inputs.shards is set the result is that of all ranks merged, and the oracle that of the
    one call over all keys. reference, profile, evidence: as for sparse prefill; the flashmla
    profile takes the table row of the surface (tolerance.py).

    Rows without a key on this rank and padded rows: out 0, lse -inf, exactly. Every row is judged
    by the oracle up to 5e11 FLOP, as for sparse prefill.

    ValueError: an unknown profile; inputs that no implementation may be given; shards that don't
    make up the whole; unknown parts.
    """
    check_profile(profile)
    if fault := _form(inputs, candidate):
        return refusal(inputs, fault)
    evidence = evidence or evidence_of(inputs)
    other = None if reference is None else _form(inputs, reference)
    results = [candidate] if reference is None or other else [candidate, reference]
    contract = contract_of(inputs, *results)
    if reference is not None and other is None:
        other = side_of(inputs, reference, contract)
    return verdict_on(
        evidence,
        side_of(inputs, candidate, contract),
        other,
        Remarks(
            diagnose=lambda side, suspects: diagnose(evidence, side.view, suspects, side.special),
            details=_size,
            notes=_profile_notes(inputs, contract, profile),
        ),
        profile=profile,
    )


def side_of(
    inputs: DcpDecodeInputs, result: DcpDecodeResult, contract: Contract | None = None
) -> Side:
    """A well-formed result, to be measured; contract: None is that of this result alone."""
    view = ResultView(_plain(result), merges_parts=True, rounded_parts=PARTS.index(result.parts))
    return Side(view, inputs.case, contract or contract_of(inputs, result), notes=result.notes)


def contract_of(inputs: DcpDecodeInputs, *results: DcpDecodeResult) -> Contract:
    """What is asked of results on these inputs."""
    merged = bool(inputs.shards)
    whose, rules = tolerances(
        merged=merged,
        rounded_parts=any(result.parts != "float32" for result in results),
        float8=inputs.kv_cache.dtype.itemsize == 1,
    )
    return Contract(
        tolerances=rules,
        whose=whose,
        empty_lse=-math.inf,
        no_key="the row sees no key" if merged else "the row sees no key on this rank",
        nan_key="a NaN in q or in a key that the row sees",
        exact_lse_ulps=EXACT_MERGED_LSE_ULPS + merged * MERGE_ULPS,
    )


def _profile_notes(inputs: DcpDecodeInputs, contract: Contract, profile: str) -> tuple[str, ...]:
    exact = getattr(inputs.case, "data", None) == "exact"
    if profile == "calibrated" or exact or contract.tolerances is not FLASHMLA_DENSE:
        return ()
    return (
        "FlashMLA's tolerances are made for its own data, keys a tenth of the size of N(0, 1): on "
        "other data right kernels may fall outside of abs 8e-4",
    )


def _form(inputs: DcpDecodeInputs, result: DcpDecodeResult) -> FormFault | None:
    if result.parts not in PARTS:
        accepted = ", ".join(PARTS)
        raise ValueError(f"result: parts is {result.parts!r}; accepted: {accepted}")
    T, H, _ = inputs.q.shape
    return form_fault(_plain(result), T, H, _VALUE_WIDTH)


def _plain(result: DcpDecodeResult) -> SparsePrefillResult:
    """The result as one without max_logits."""
    return SparsePrefillResult(out=result.out, lse=result.lse, out_rows=result.out_rows)


def _size(side: Side) -> list[str]:
    """How far a failing candidate is off, in absolute terms."""
    metrics = side.numbers.metrics
    sizes = [f"{metrics[name].max_abs:.3g} in {name}" for name in ("out", "lse")]
    return [f"off by up to {' and '.join(sizes)}"]
