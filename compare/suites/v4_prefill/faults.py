"""The known faults of the V4 prefill path: of the gather, of the lists, and of the attention where
it meets them. Those of the attention alone are judging/attention_faults.py's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from compare.judging import attention_faults
from compare.judging.evidence import Evidence
from compare.judging.faults import Fault, Sample, possible_faults
from compare.judging.rows import OracleRows
from compare.suites.v4_prefill.call import V4PrefillInputs
from compare.suites.v4_prefill.evidence import V4Witness
from compare.suites.v4_prefill.plan import right_plan
from torch_ref.v4.variants import RIGHT, V4Variant


def _several_requests(inputs: V4PrefillInputs) -> bool:
    return len(inputs.seq_lens) > 1


def _has_entries(inputs: V4PrefillInputs) -> bool:
    return inputs.compressed_cache is not None


def _has_entries_of_several(inputs: V4PrefillInputs) -> bool:
    return _has_entries(inputs) and _several_requests(inputs)


def _has_images(inputs: V4PrefillInputs) -> bool:
    return inputs.image_spans is not None


def _in_pages(inputs: V4PrefillInputs) -> bool:
    return inputs.kv_format == "v4-fp8"


def _window_in_words(more: int) -> Callable[[V4PrefillInputs], str]:
    return lambda inputs: (
        f"a token sees {inputs.window + more} positions, its own included; its window has "
        f"{inputs.window}"
    )


_indices = partial(Fault, stage="indices")
_of_requests = partial(_indices, possible=_several_requests)
_of_entries = partial(_indices, possible=_has_entries)
_gather = partial(Fault, stage="gather")
_of_pages = partial(_gather, possible=_in_pages)

FAULTS = (
    # What a token sees.
    _indices(
        name="window-too-long", sentence=_window_in_words(1), variant=V4Variant(window_shift=1)
    ),
    _indices(
        name="window-too-short", sentence=_window_in_words(-1), variant=V4Variant(window_shift=-1)
    ),
    _indices(
        name="sees-the-next-position",
        sentence="a token sees the position after its own",
        variant=V4Variant(ahead=1),
    ),
    _indices(
        name="prefix-for-seq-len",
        sentence="a request's context is counted without this step's tokens: what is read is as "
        "far before the right keys as the step has tokens",
        variant=V4Variant(lengths="prefix"),
    ),
    _indices(
        name="window-left-out",
        sentence="no position of the window is attended to, compressed entries alone",
        variant=V4Variant(window_keys="left_out"),
    ),
    _indices(
        name="image-ignored",
        sentence="tokens of an image see their window alone, not the whole image",
        variant=V4Variant(image="ignored"),
        possible=_has_images,
    ),
    Fault(
        name="minus-one-wraps",
        sentence="the -1 behind a list are attended to as the last row of the workspace",
        variant=V4Variant(empty_slots="last_row"),
    ),
    # Whose keys it sees.
    _of_requests(
        name="request-base-missing",
        sentence="each request uses the rows of its chunk's first one: its base, M for each "
        "request before it, isn't added",
        variant=V4Variant(request="first"),
    ),
    _of_requests(
        name="request-base-doubled",
        sentence="the base of a request, M rows for each request before it, is added twice",
        variant=V4Variant(request="doubled"),
    ),
    _of_requests(
        name="neighbour-request",
        sentence="each token uses the keys of the request after its own",
        variant=V4Variant(request="next"),
    ),
    _of_requests(
        name="neighbour-request",
        which="before",
        sentence="each token uses the keys of the request before its own",
        variant=V4Variant(request="previous"),
    ),
    # Compressed entries, and where the window's rows begin behind them.
    _of_entries(
        name="compressed-left-out",
        sentence="no compressed entry is attended to, the window alone",
        variant=V4Variant(entries="left_out"),
    ),
    _of_entries(
        name="entry-seen-late",
        sentence="a token has position // ratio entries; the one that ends with its own position "
        "counts too, (position + 1) // ratio",
        variant=V4Variant(entries="late"),
    ),
    _of_entries(
        name="topk-length-ignored",
        sentence="the whole row of topk_indices is used, the -1 behind its entries too, which name "
        "the last row of the request before",
        variant=V4Variant(entries="uncut"),
    ),
    _of_entries(
        name="window-offset-missing",
        sentence="the window's rows are looked for from row 0 on, where the compressed entries "
        "are; N isn't added",
        variant=V4Variant(offset="missing"),
    ),
    _of_entries(
        name="window-offset-doubled",
        sentence="N, the offset of the window's rows, is added twice",
        variant=V4Variant(offset="doubled"),
    ),
    _indices(
        name="entries-of-neighbour-request",
        sentence="compressed entries are those of the request after the token's own",
        variant=V4Variant(entries_of="next"),
        possible=_has_entries_of_several,
    ),
    _indices(
        name="entries-of-neighbour-request",
        which="before",
        sentence="compressed entries are those of the request before the token's own",
        variant=V4Variant(entries_of="previous"),
        possible=_has_entries_of_several,
    ),
    # What the gather puts into a row.
    _gather(
        name="gather-off-by-one",
        sentence="each position's row holds the position before it",
        variant=V4Variant(position_shift=-1),
    ),
    _gather(
        name="gather-off-by-one",
        which="after",
        sentence="each position's row holds the position after it",
        variant=V4Variant(position_shift=1),
    ),
    _gather(
        name="prefix-for-seq-len",
        which="gather",
        sentence="the window's gather ends with the prefix: each row holds a position as far "
        "before the right one as the step has tokens",
        variant=V4Variant(position_shift="queries"),
    ),
    _gather(
        name="neighbour-request",
        which="gather",
        sentence="a request's keys are read through the block tables of the request after it",
        variant=V4Variant(request="next"),
    ),
    _gather(
        name="neighbour-request",
        which="gather, before",
        sentence="a request's keys are read through the block tables of the request before it",
        variant=V4Variant(request="previous"),
    ),
    _gather(
        name="request-base-missing",
        which="gather",
        sentence="a request's keys are read through the block tables of its chunk's first one",
        variant=V4Variant(request="first"),
    ),
    # How a stored token is read.
    _of_pages(
        name="scales-of-neighbour-token",
        sentence="a token is multiplied by the scales of the token after it",
        variant=V4Variant(reading="next_scales"),
    ),
    _of_pages(
        name="scales-of-neighbour-token",
        which="before",
        sentence="a token is multiplied by the scales of the token before it",
        variant=V4Variant(reading="previous_scales"),
    ),
    _of_pages(
        name="page-not-split",
        sentence="a page is read as tokens of 584 bytes side by side; its scales stand behind the "
        "data of all of its tokens",
        variant=V4Variant(reading="interleaved"),
    ),
    _of_pages(
        name="page-stride-unpadded",
        sentence="pages are looked for every P * 584 bytes; they lie that far apart rounded up to "
        "576",
        variant=V4Variant(reading="unpadded_stride"),
    ),
    _of_pages(
        name="scale-groups-of-128",
        sentence="a scale is used for 128 columns, as V3.2 has it; V4 has one for 64",
        variant=V4Variant(reading="groups_of_128"),
    ),
    _of_pages(
        name="scales-ignored",
        sentence="codes are not multiplied by their scales",
        variant=V4Variant(reading="scales_ignored"),
    ),
)


def faults_of(evidence: Evidence[V4Witness]) -> Iterator[Fault]:
    """Those that are possible with a case's inputs, of the attention too."""
    yield from possible_faults(attention_faults.FAULTS, evidence.witness.call)
    for fault in possible_faults(FAULTS, evidence.inputs):
        yield dataclasses.replace(fault, rows=partial(_planted, fault.variant))


def right_rows(sample: Sample) -> OracleRows:
    """The contract by the way that faults of the path are computed."""
    inputs = sample.evidence.inputs
    rows, _ = sample.evidence.witness.deviation(
        sample.tokens, RIGHT, right_plan(inputs), through="cache"
    )
    return rows


def _planted(variant: V4Variant, sample: Sample) -> OracleRows:
    """The tensors with a fault in the rows of a right plan's workspaces, or where it can't be there
    in what is read; tokens of which it can't be told stay right.
    """
    through = "workspace" if variant.possible("workspace") else "cache"
    plan = right_plan(sample.evidence.inputs)
    rows, unknown = sample.evidence.witness.deviation(sample.tokens, variant, plan, through=through)
    kept = {"out": unknown[:, None, None]}
    right = sample.once(right_rows)
    return OracleRows(
        **{
            name: np.where(kept.get(name, unknown[:, None]), getattr(right, name), values)
            for name, values in vars(rows).items()
        }
    )
