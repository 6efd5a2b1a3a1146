"""The known faults of DCP decode. Where ranks are merged, one is a fault of every rank, merged
rightly, or one of the merge.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, Sample, possible_faults
from compare.judging.rows import OracleRows
from compare.judging.shared_faults import (
    LSE_TIMES_LN_2,
    NEIGHBOUR_TOKENS,
    OUT_ALL_ZERO,
    heads_rotated,
)
from compare.suites.dcp_decode.call import DcpDecodeInputs
from compare.suites.dcp_decode.evidence import as_rows
from torch_ref import DecodeOracleResult, DecodeVariant

_BASE_2 = 1.0 / math.log(2.0)
_RESHAPED = DecodeVariant(lse_layout="reshaped")
_RESHAPED_WORDS = "each request's lse [H, q] is read as [q, H]; it must be transposed, not reshaped"


def _merged(inputs: DcpDecodeInputs) -> bool:
    return bool(inputs.shards)


def _several_ranks_merged(inputs: DcpDecodeInputs) -> bool:
    return len(inputs.shards or ()) > 1


def _of_one_rank(inputs: DcpDecodeInputs) -> DcpDecodeInputs:
    return inputs.shards[0] if inputs.shards else inputs


def _interleaved(inputs: DcpDecodeInputs) -> bool:
    return _of_one_rank(inputs).interleave > 1


def _several_requests(inputs: DcpDecodeInputs) -> bool:
    return len(inputs.total_lens) > 1


def _keys_have_a_scale(inputs: DcpDecodeInputs) -> bool:
    return inputs.kv_scale not in (None, 1.0)


def _other_ranks(inputs: DcpDecodeInputs) -> Iterable[tuple[int, int]]:
    """(another rank, the call's own)."""
    own = inputs.dcp_rank
    return ((rank, own) for rank in range(inputs.dcp_world) if rank != own)


def _view_in_words(inputs: DcpDecodeInputs) -> str:
    starts = inputs.query_start_loc
    rows, requests = len(inputs.q), len(starts) - 1
    lens = "+".join(map(str, np.diff(starts).tolist()))
    padded = rows - int(starts[-1])
    padding = f" and {padded} rows of padding" if padded else ""
    each = "+".join([str(rows // max(requests, 1))] * requests)
    return f"{lens}{padding} is viewed as {each}: rows get other tokens' bounds or other requests"


def _lse_base_2(_: Any, sample: Sample) -> OracleRows:
    contract = sample.contract
    return dataclasses.replace(contract, lse=contract.lse / math.log(2.0))


def _parts(sample: Sample) -> list[DecodeOracleResult]:
    return sample.evidence.witness.parts(sample.tokens)


def _merge(sample: Sample, factors: list[float]) -> OracleRows:
    """The right parts, merged after each rank's lse was multiplied by a factor."""
    import torch_ref

    scaled = [
        dataclasses.replace(part, lse=part.lse * factor)
        for part, factor in zip(sample.once(_parts), factors, strict=True)
    ]
    return as_rows(torch_ref.merge_oracle(scaled))


def _all_base_2(after: float, sample: Sample) -> OracleRows:
    rows = _merge(sample, [_BASE_2] * len(sample.once(_parts)))
    return dataclasses.replace(rows, lse=rows.lse * after)


def _bases_mixed(case: tuple[int, float, float, str], sample: Sample) -> OracleRows:
    odd, mine, others, _ = case
    ranks = range(len(sample.once(_parts)))
    return _merge(sample, [mine if rank == odd else others for rank in ranks])


def _mixtures(inputs: DcpDecodeInputs) -> Iterator[tuple[int, float, float, str]]:
    """(rank, factor of its lse, factor of the others', in words)."""
    for odd in range(len(inputs.shards or ())):
        yield odd, _BASE_2, 1.0, f"rank {odd} only"
        yield odd, 1.0, _BASE_2, f"all but rank {odd}"


def _mean_of_outs(_: Any, sample: Sample) -> OracleRows:
    outs = [as_rows(part).out for part in sample.once(_parts)]
    return dataclasses.replace(sample.contract, out=np.mean(outs, axis=0))


FAULTS = (
    Fault(
        name="empty-lse-plus-inf",
        sentence="undeclared empty-lse convention: {count} rows without a key have lse +inf, as "
        "FlashMLA; decode and merging have -inf there",
        variant=DecodeVariant(empty_lse="+inf"),
        possible=lambda inputs: not _merged(inputs),
        count=lambda special: special.other_inf_at_empty,
    ),
    Fault(
        name="empty-rank-lse-zero",
        sentence="{count} rows without a key have lse 0, which a merge takes for a key of score 0; "
        "-inf is due",
        variant=DecodeVariant(empty_lse="0"),
        possible=lambda inputs: not _merged(inputs),
        count=lambda special: special.zero_lse_at_empty,
    ),
    Fault(
        name="all-rows-at-total",
        sentence="every row is bounded at its request's total length: tokens see those after them",
        variant=DecodeVariant(bound="total"),
    ),
    Fault(
        name="bound-off-by-one",
        sentence="every row sees one key too many: a token sees the one after it",
        variant=DecodeVariant(bound="plus_one"),
    ),
    Fault(
        name="bound-off-by-one",
        which="short",
        sentence="every row sees one key too few: a token doesn't see itself",
        variant=DecodeVariant(bound="minus_one"),
    ),
    Fault(
        name="localised-before-expanding",
        sentence="a row's keys are the rank's less the tokens after it: bounds must be expanded in "
        "global positions and localised after",
        variant=DecodeVariant(bound="after_localising"),
    ),
    Fault(name="viewed-as-uniform", sentence=_view_in_words, variant=DecodeVariant(view="uniform")),
    Fault(
        name="wrong-value-columns",
        sentence="V starts 64 columns too far; it is the first 512 columns of a key",
        variant=DecodeVariant(v_offset=64),
    ),
    Fault(
        name="empty-rank-lse-zero",
        which="merged",
        sentence="a rank without a key of a row gives it lse 0, which the merge takes for a key of "
        "score 0",
        variant=DecodeVariant(empty_lse="0"),
        possible=_merged,
    ),
    Fault(
        name="interleave-ignored",
        sentence=lambda inputs: (
            "rows are masked as if neighbouring keys lay on different ranks; "
            f"they lie in runs of {_of_one_rank(inputs).interleave}"
        ),
        variant=DecodeVariant(mask_interleave=1),
        possible=_interleaved,
    ),
    Fault(
        name="wrong-rank-mask",
        sentence=lambda ranks: (
            f"rows are masked by the positions of rank {ranks[0]}; the keys are "
            f"those of rank {ranks[1]}"
        ),
        variant=lambda ranks: DecodeVariant(mask_rank=ranks[0]),
        possible=lambda inputs: not _merged(inputs),
        each=_other_ranks,
    ),
    *(
        Fault(
            name="neighbour-request",
            which=which,
            sentence=f"each row uses block table and length of the request {word} its own",
            variant=DecodeVariant(request_shift=shift),
            possible=_several_requests,
        )
        for shift, word, which in ((1, "after", ""), (-1, "before", "before"))
    ),
    Fault(
        name="scale-twice",
        sentence="scores are multiplied by sm_scale twice",
        variant=DecodeVariant(scale_power=2),
        possible=lambda inputs: inputs.sm_scale != 1.0,
    ),
    Fault(
        name="kv-scale-ignored",
        sentence="kv_scale is applied neither to keys nor to values",
        variant=DecodeVariant(kv_scale="ignored"),
        possible=_keys_have_a_scale,
    ),
    Fault(
        name="kv-scale-on-keys-only",
        sentence="kv_scale is applied to scores and not to values",
        variant=DecodeVariant(kv_scale="keys_only"),
        possible=_keys_have_a_scale,
    ),
    Fault(
        name="kv-scale-on-values-only",
        sentence="kv_scale is applied to values and not to scores",
        variant=DecodeVariant(kv_scale="values_only"),
        possible=_keys_have_a_scale,
    ),
    Fault(
        name="q-scale-ignored",
        sentence="q_scale isn't applied to the stored queries",
        variant=DecodeVariant(q_scale="ignored"),
        possible=lambda inputs: inputs.q_scale not in (None, 1.0),
    ),
    Fault(
        name="lse-base-2",
        sentence="lse is in base 2: the natural one times 1.4427",
        rows=_lse_base_2,
    ),
    LSE_TIMES_LN_2,
    Fault(
        name="lse-layout-reshaped",
        sentence=_RESHAPED_WORDS,
        rows=lambda _, sample: sample.evidence.witness.whole(sample.tokens, _RESHAPED),
    ),
    Fault(
        name="lse-layout-reshaped",
        which="on every rank",
        sentence=_RESHAPED_WORDS,
        variant=_RESHAPED,
        possible=_merged,
    ),
    *(
        Fault(
            name="lse-base-2-in-merge",
            which=which,
            sentence=f"all ranks' lses are in base 2 and merged as natural ones{word}",
            possible=_merged,
            each=lambda _, after=after: (after,),
            rows=_all_base_2,
        )
        for after, which, word in (
            (1.0, "", ""),
            (1.0 / _BASE_2, "brought back", ", and the merged lse brought to natural"),
        )
    ),
    Fault(
        name="lse-bases-mixed",
        sentence=lambda case: f"the ranks' lses are in two bases: base 2 on {case[3]}",
        possible=_several_ranks_merged,
        each=_mixtures,
        rows=_bases_mixed,
    ),
    Fault(
        name="ranks-not-merged",
        sentence=lambda rank: f"the result is that of rank {rank} alone",
        possible=_several_ranks_merged,
        each=lambda inputs: range(len(inputs.shards)),
        rows=lambda rank, sample: as_rows(sample.once(_parts)[rank]),
    ),
    Fault(
        name="merged-without-weights",
        sentence="out is the mean of the ranks' outs, each counted alike",
        possible=_merged,
        rows=_mean_of_outs,
    ),
    heads_rotated(DecodeVariant(head_shift=1)),
    *NEIGHBOUR_TOKENS,
    OUT_ALL_ZERO,
)


def faults_of(evidence: Evidence[Any]) -> Iterator[Fault]:
    """Those that are possible with a case's inputs."""
    return possible_faults(FAULTS, evidence.inputs)
