"""The known faults of the V4 prefill path: slug, sentence and deviation. Names are stable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from compare.suites.v4_prefill.call import V4PrefillInputs

if TYPE_CHECKING:
    from torch_ref.v4.variants import V4Variant


class Fault(NamedTuple):
    """name: a slug. stage: the first one that it makes wrong, gather, indices or attention."""

    name: str
    sentence: str
    stage: str
    variant: V4Variant


def faults(inputs: V4PrefillInputs) -> Iterator[Fault]:
    """Those that are possible with such inputs; whether the values show one is another question."""
    yield from _of_what_is_seen(inputs)
    yield from _of_requests(inputs)
    if inputs.compressed_cache is not None:
        yield from _of_entries(inputs)
    yield from _of_the_gather()
    if inputs.kv_format == "v4-fp8":
        yield from _of_pages()


def _of_what_is_seen(inputs: V4PrefillInputs) -> Iterator[Fault]:
    from torch_ref.v4.variants import V4Variant

    window = inputs.window
    listed = [
        (
            "window-too-long",
            f"a token sees {window + 1} positions, its own included; its window has {window}",
            V4Variant(window_shift=1),
        ),
        (
            "window-too-short",
            f"a token sees {window - 1} positions, its own included; its window has {window}",
            V4Variant(window_shift=-1),
        ),
        (
            "sees-the-next-position",
            "a token sees the position after its own",
            V4Variant(ahead=1),
        ),
        (
            "prefix-for-seq-len",
            "a request's context is counted without this step's tokens: what is read is as far "
            "before the right keys as the step has tokens",
            V4Variant(lengths="prefix"),
        ),
        (
            "window-left-out",
            "no position of the window is attended to, compressed entries alone",
            V4Variant(window_keys="left_out"),
        ),
    ]
    if inputs.image_spans is not None:
        listed.append(
            (
                "image-ignored",
                "tokens of an image see their window alone, not the whole image",
                V4Variant(image="ignored"),
            )
        )
    for name, sentence, variant in listed:
        yield Fault(name, sentence, "indices", variant)
    yield Fault(
        "minus-one-wraps",
        "the -1 behind a list are attended to as the last row of the workspace",
        "attention",
        V4Variant(empty_slots="last_row"),
    )


def _of_requests(inputs: V4PrefillInputs) -> Iterator[Fault]:
    from torch_ref.v4.variants import V4Variant

    if len(inputs.seq_lens) < 2:
        return
    yield Fault(
        "request-base-missing",
        "each request uses the rows of its chunk's first one: its base, M for each request before "
        "it, isn't added",
        "indices",
        V4Variant(request="first"),
    )
    yield Fault(
        "request-base-doubled",
        "the base of a request, M rows for each request before it, is added twice",
        "indices",
        V4Variant(request="doubled"),
    )
    yield Fault(
        "neighbour-request",
        "each token uses the keys of the request after its own",
        "indices",
        V4Variant(request="next"),
    )
    yield Fault(
        "neighbour-request",
        "each token uses the keys of the request before its own",
        "indices",
        V4Variant(request="previous"),
    )


def _of_entries(inputs: V4PrefillInputs) -> Iterator[Fault]:
    from torch_ref.v4.variants import V4Variant

    listed = [
        (
            "compressed-left-out",
            "no compressed entry is attended to, the window alone",
            V4Variant(entries="left_out"),
        ),
        (
            "entry-seen-late",
            "a token has position // ratio entries; the one that ends with its own position counts "
            "too, (position + 1) // ratio",
            V4Variant(entries="late"),
        ),
        (
            "topk-length-ignored",
            "the whole row of topk_indices is used, the -1 behind its entries too, which name the "
            "last row of the request before",
            V4Variant(entries="uncut"),
        ),
        (
            "window-offset-missing",
            "the window's rows are looked for from row 0 on, where the compressed entries are; N "
            "isn't added",
            V4Variant(offset="missing"),
        ),
        (
            "window-offset-doubled",
            "N, the offset of the window's rows, is added twice",
            V4Variant(offset="doubled"),
        ),
    ]
    if len(inputs.seq_lens) > 1:
        listed += [
            (
                "entries-of-neighbour-request",
                f"compressed entries are those of the request {word} the token's own",
                variant,
            )
            for word, variant in (
                ("after", V4Variant(entries_of="next")),
                ("before", V4Variant(entries_of="previous")),
            )
        ]
    for name, sentence, variant in listed:
        yield Fault(name, sentence, "indices", variant)


def _of_the_gather() -> Iterator[Fault]:
    from torch_ref.v4.variants import V4Variant

    for shift, word in ((-1, "before"), (1, "after")):
        yield Fault(
            "gather-off-by-one",
            f"each position's row holds the position {word} it",
            "gather",
            V4Variant(position_shift=shift),
        )
    yield Fault(
        "prefix-for-seq-len",
        "the window's gather ends with the prefix: each row holds a position as far before the "
        "right one as the step has tokens",
        "gather",
        V4Variant(position_shift="queries"),
    )
    for word, variant in (
        ("after", V4Variant(request="next")),
        ("before", V4Variant(request="previous")),
    ):
        yield Fault(
            "neighbour-request",
            f"a request's keys are read through the block tables of the request {word} it",
            "gather",
            variant,
        )
    yield Fault(
        "request-base-missing",
        "a request's keys are read through the block tables of its chunk's first one",
        "gather",
        V4Variant(request="first"),
    )


def _of_pages() -> Iterator[Fault]:
    from torch_ref.v4.variants import V4Variant

    for name, sentence, variant in (
        (
            "scales-of-neighbour-token",
            "a token is multiplied by the scales of the token after it",
            V4Variant(reading="next_scales"),
        ),
        (
            "scales-of-neighbour-token",
            "a token is multiplied by the scales of the token before it",
            V4Variant(reading="previous_scales"),
        ),
        (
            "page-not-split",
            "a page is read as tokens of 584 bytes side by side; its scales stand behind the data "
            "of all of its tokens",
            V4Variant(reading="interleaved"),
        ),
        (
            "page-stride-unpadded",
            "pages are looked for every P * 584 bytes; they lie that far apart rounded up to 576",
            V4Variant(reading="unpadded_stride"),
        ),
        (
            "scale-groups-of-128",
            "a scale is used for 128 columns, as V3.2 has it; V4 has one for 64",
            V4Variant(reading="groups_of_128"),
        ),
        (
            "scales-ignored",
            "codes are not multiplied by their scales",
            V4Variant(reading="scales_ignored"),
        ),
    ):
        yield Fault(name, sentence, "gather", variant)
