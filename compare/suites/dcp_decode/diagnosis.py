"""Names of decode's faults, from the tensors alone: what each would make of these inputs.

Where ranks were merged, a fault is one of every rank's, merged rightly, or one of the merge.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from compare.judging.diagnosis import explanations, sample_of
from compare.judging.evidence import Evidence
from compare.judging.hypotheses import Hypothesis, Sample, head_orders, neighbour_tokens
from compare.judging.result_view import ResultView
from compare.judging.rows import OracleRows
from compare.judging.special import SpecialValues
from compare.protocol.verdict import Diagnosis
from compare.suites.dcp_decode.evidence import DecodeWitness, as_rows

_ORACLE_RUNS = 24


def diagnose(
    evidence: Evidence[DecodeWitness], view: ResultView, suspects: list[int], special: SpecialValues
) -> tuple[Diagnosis, ...]:
    """The faults that a failing candidate's tensors show; () where none explains them.

    suspects: tokens to look at first. A hypothesis that another one explains as well is flagged in
    its sentence.
    """
    found = []
    if special.other_inf_at_empty:
        found.append(
            Diagnosis(
                name="empty-lse-plus-inf",
                sentence=f"undeclared empty-lse convention: {special.other_inf_at_empty} rows "
                "without a key have lse +inf, as FlashMLA; decode and merging have -inf there",
            )
        )
    if special.zero_lse_at_empty:
        found.append(
            Diagnosis(
                name="empty-rank-lse-zero",
                sentence=f"{special.zero_lse_at_empty} rows without a key have lse 0, which a "
                "merge takes for a key of score 0; -inf is due",
            )
        )
    padded = [t for t in special.suspects if evidence.witness.keys.request[t] < 0]
    if padded:
        found.append(
            Diagnosis(
                name="padded-rows-not-empty",
                sentence=f"row {padded[0]} belongs to no request and has a result; padded rows "
                "have out 0 and lse -inf",
            )
        )
    sample = sample_of(evidence, view, suspects, oracle_runs=_ORACLE_RUNS)
    if sample is not None:
        found += explanations(sample, hypotheses(evidence, sample))
    return tuple(found)


def hypotheses(evidence: Evidence[DecodeWitness], sample: Sample) -> Iterator[Hypothesis]:
    """All faults that are possible with these inputs. Names are stable; reports rely on them."""
    yield from _deviations(evidence, sample.tokens)
    yield from _of_lse(evidence, sample)
    if evidence.inputs.shards:
        yield from _of_the_merge(evidence, sample)
    yield from head_orders(sample)
    yield from neighbour_tokens(sample)
    contract = sample.contract
    yield Hypothesis(
        name="out-all-zero",
        sentence="out is 0 everywhere",
        rows=lambda: dataclasses.replace(contract, out=np.zeros_like(contract.out)),
    )


def _deviations(
    evidence: Evidence[DecodeWitness], tokens: Int64[np.ndarray, " n"]
) -> Iterator[Hypothesis]:
    """The deviations that torch_ref's oracle computes itself, on every rank that runs."""
    from torch_ref import DecodeVariant

    inputs = evidence.inputs
    calls = inputs.shards or (inputs,)
    world, interleave = calls[0].dcp_world, calls[0].interleave
    found: list[tuple[str, str, DecodeVariant]] = [
        (
            "all-rows-at-total",
            "every row is bounded at its request's total length: tokens see those after them",
            DecodeVariant(bound="total"),
        ),
        (
            "bound-off-by-one",
            "every row sees one key too many: a token sees the one after it",
            DecodeVariant(bound="plus_one"),
        ),
        (
            "bound-off-by-one",
            "every row sees one key too few: a token doesn't see itself",
            DecodeVariant(bound="minus_one"),
        ),
        (
            "localised-before-expanding",
            "a row's keys are the rank's less the tokens after it: bounds must be expanded in "
            "global positions and localised after",
            DecodeVariant(bound="after_localising"),
        ),
        ("viewed-as-uniform", _view_in_words(evidence), DecodeVariant(view="uniform")),
        (
            "wrong-value-columns",
            "V starts 64 columns too far; it is the first 512 columns of a key",
            DecodeVariant(v_offset=64),
        ),
    ]
    if inputs.shards:
        found.append(
            (
                "empty-rank-lse-zero",
                "a rank without a key of a row gives it lse 0, which the merge takes for a key of "
                "score 0",
                DecodeVariant(empty_lse="0"),
            )
        )
    if interleave > 1:
        found.append(
            (
                "interleave-ignored",
                f"rows are masked as if neighbouring keys lay on different ranks; they lie in runs "
                f"of {interleave}",
                DecodeVariant(mask_interleave=1),
            )
        )
    if not inputs.shards:
        for rank in range(world):
            if rank != inputs.dcp_rank:
                found.append(
                    (
                        "wrong-rank-mask",
                        f"rows are masked by the positions of rank {rank}; the keys are those of "
                        f"rank {inputs.dcp_rank}",
                        DecodeVariant(mask_rank=rank),
                    )
                )
    for shift in (1, -1) if len(inputs.total_lens) > 1 else ():
        word = "after" if shift > 0 else "before"
        found.append(
            (
                "neighbour-request",
                f"each row uses block table and length of the request {word} its own",
                DecodeVariant(request_shift=shift),
            )
        )
    if inputs.sm_scale != 1.0:
        found.append(
            (
                "scale-twice",
                "scores are multiplied by sm_scale twice",
                DecodeVariant(scale_power=2),
            )
        )
    if inputs.kv_scale not in (None, 1.0):
        found += [
            (
                "kv-scale-ignored",
                "kv_scale is applied neither to keys nor to values",
                DecodeVariant(kv_scale="ignored"),
            ),
            (
                "kv-scale-on-keys-only",
                "kv_scale is applied to scores and not to values",
                DecodeVariant(kv_scale="keys_only"),
            ),
            (
                "kv-scale-on-values-only",
                "kv_scale is applied to values and not to scores",
                DecodeVariant(kv_scale="values_only"),
            ),
        ]
    if inputs.q_scale not in (None, 1.0):
        found.append(
            (
                "q-scale-ignored",
                "q_scale isn't applied to the stored queries",
                DecodeVariant(q_scale="ignored"),
            )
        )
    for name, sentence, variant in found:
        yield Hypothesis(
            name=name,
            sentence=sentence,
            rows=lambda variant=variant: evidence.oracle(tokens, variant),
        )


def _view_in_words(evidence: Evidence[DecodeWitness]) -> str:
    starts = evidence.inputs.query_start_loc
    rows, requests = len(evidence.inputs.q), len(starts) - 1
    lens = "+".join(map(str, np.diff(starts).tolist()))
    padded = rows - int(starts[-1])
    padding = f" and {padded} rows of padding" if padded else ""
    each = "+".join([str(rows // max(requests, 1))] * requests)
    return f"{lens}{padding} is viewed as {each}: rows get other tokens' bounds or other requests"


def _of_lse(evidence: Evidence[DecodeWitness], sample: Sample) -> Iterator[Hypothesis]:
    """Faults of the returned lse alone."""
    from torch_ref import DecodeVariant

    contract = sample.contract
    yield Hypothesis(
        name="lse-base-2",
        sentence="lse is in base 2: the natural one times 1.4427",
        rows=lambda: dataclasses.replace(contract, lse=contract.lse / math.log(2.0)),
    )
    yield Hypothesis(
        name="lse-times-ln-2",
        sentence="lse is the natural one times ln 2, as if it had been in base 2",
        rows=lambda: dataclasses.replace(contract, lse=contract.lse * math.log(2.0)),
    )
    reshaped = DecodeVariant(lse_layout="reshaped")
    for of in (
        (evidence.witness.whole, evidence.oracle)
        if evidence.inputs.shards
        else (evidence.witness.whole,)
    ):
        yield Hypothesis(
            name="lse-layout-reshaped",
            sentence="each request's lse [H, q] is read as [q, H]; it must be transposed, not "
            "reshaped",
            rows=lambda of=of: of(sample.tokens, reshaped),
        )


def _of_the_merge(evidence: Evidence[DecodeWitness], sample: Sample) -> Iterator[Hypothesis]:
    """Right partial results, put together wrongly."""
    parts = evidence.witness.parts(sample.tokens)
    ranks = range(len(parts))
    base2 = 1.0 / math.log(2.0)

    def merged(factors: list[float], after: float = 1.0) -> OracleRows:
        import torch_ref

        scaled = [
            dataclasses.replace(part, lse=part.lse * factor)
            for part, factor in zip(parts, factors, strict=True)
        ]
        rows = as_rows(torch_ref.merge_oracle(scaled))
        return dataclasses.replace(rows, lse=rows.lse * after)

    for after, word in ((1.0, ""), (1.0 / base2, ", and the merged lse brought to natural")):
        yield Hypothesis(
            name="lse-base-2-in-merge",
            sentence=f"all ranks' lses are in base 2 and merged as natural ones{word}",
            rows=lambda after=after: merged([base2] * len(parts), after),
        )
    for odd in ranks if len(parts) > 1 else ():
        for mine, others, which in (
            (base2, 1.0, f"rank {odd} only"),
            (1.0, base2, f"all but rank {odd}"),
        ):
            yield Hypothesis(
                name="lse-bases-mixed",
                sentence=f"the ranks' lses are in two bases: base 2 on {which}",
                rows=lambda odd=odd, mine=mine, others=others: merged(
                    [mine if rank == odd else others for rank in ranks]
                ),
            )
    for rank in ranks if len(parts) > 1 else ():
        yield Hypothesis(
            name="ranks-not-merged",
            sentence=f"the result is that of rank {rank} alone",
            rows=lambda rank=rank: as_rows(parts[rank]),
        )
    yield Hypothesis(
        name="merged-without-weights",
        sentence="out is the mean of the ranks' outs, each counted alike",
        rows=lambda: dataclasses.replace(
            sample.contract,
            out=np.mean([as_rows(part).out for part in parts], axis=0),
        ),
    )
