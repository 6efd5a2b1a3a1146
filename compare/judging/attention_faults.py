"""The known faults of one sparse attention call over plain keys: the suite sparse-prefill, and the
attention of a V4 prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, possible_faults
from compare.judging.shared_faults import (
    LSE_TIMES_LN_2,
    NEIGHBOUR_TOKENS,
    OUT_ALL_ZERO,
    heads_rotated,
)
from torch_ref import Variant


def _scaled(inputs: SparsePrefillInputs) -> bool:
    return inputs.sm_scale != 1.0


def _has_sink(inputs: SparsePrefillInputs) -> bool:
    return inputs.attn_sink is not None


def _has_lengths(inputs: SparsePrefillInputs) -> bool:
    return inputs.topk_length is not None


def _names_from_the_end(inputs: SparsePrefillInputs) -> bool:
    return bool(((inputs.indices < 0) & (inputs.indices >= -len(inputs.kv))).any())


FAULTS = (
    Fault(
        name="empty-lse-minus-inf",
        sentence="{count} rows without a valid slot have lse -inf, FlashInfer's convention; sparse "
        "prefill has +inf there, as FlashMLA",
        variant=Variant(empty_lse="-inf"),
        count=lambda special: special.other_inf_at_empty,
    ),
    Fault(
        name="lse-base-2",
        sentence="lse is in base 2: the natural one times 1.4427",
        variant=Variant(lse_base2=True),
    ),
    Fault(
        name="scale-twice",
        sentence="scores are multiplied by sm_scale twice",
        variant=Variant(scale_power=2),
        possible=_scaled,
    ),
    Fault(
        name="max-before-scaling",
        sentence="max_logits is taken before the product with sm_scale",
        variant=Variant(max_logits="unscaled"),
        possible=_scaled,
    ),
    Fault(
        name="sink-omitted",
        sentence="the sink is left out of the denominator",
        variant=Variant(sink="omitted"),
        possible=_has_sink,
    ),
    Fault(
        name="sink-in-lse",
        sentence="lse counts the sink, which belongs to out",
        variant=Variant(sink="in_lse"),
        possible=_has_sink,
    ),
    Fault(
        name="sink-times-sm-scale",
        sentence="the sink is multiplied by sm_scale; it is in natural-log units already",
        variant=Variant(sink="times_scale"),
        possible=lambda inputs: _has_sink(inputs) and _scaled(inputs),
    ),
    Fault(
        name="minus-one-wraps",
        sentence="a negative index counts from the end of kv instead of naming no key",
        variant=Variant(index="minus_one_wraps"),
        possible=_names_from_the_end,
    ),
    Fault(
        name="length-ignored",
        sentence="slots at and past topk_length are attended to",
        variant=Variant(length="ignored"),
        possible=_has_lengths,
    ),
    Fault(
        name="length-off-by-one",
        sentence="each row takes one slot too many",
        variant=Variant(length="plus_one"),
        possible=_has_lengths,
    ),
    Fault(
        name="length-off-by-one",
        which="short",
        sentence="each row takes one slot too few",
        variant=Variant(length="minus_one"),
        possible=_has_lengths,
    ),
    # At D = 512 the columns wrap around; at 576 these are the last 512.
    Fault(
        name="wrong-value-columns",
        sentence="V starts 64 columns too far; it is the first 512 columns of kv",
        variant=Variant(v_offset=64),
    ),
    heads_rotated(Variant(head_shift=1)),
    *NEIGHBOUR_TOKENS,
    LSE_TIMES_LN_2,
    OUT_ALL_ZERO,
)


def faults_of(evidence: Evidence[Any]) -> Iterator[Fault]:
    """Those that are possible with a case's inputs."""
    return possible_faults(FAULTS, evidence.inputs)
