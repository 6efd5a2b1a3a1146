"""How a warp copies a row: pieces of eight columns, one to a lane, 32 of them in a step.

A piece is 8 bytes of codes or 16 of bfloat16 to read, and 16 bytes of bfloat16 to write: a step
writes 512 bytes of the workspace that lie side by side, and reads bytes that do. What a format
has to fulfil for that is checked here.
"""

from __future__ import annotations

from typing import NamedTuple

from jax_impl.kv_cache.formats import BF16_BYTES, KVFormat

COLUMNS = 8
LANES = 32
WRITTEN_BYTES = COLUMNS * BF16_BYTES
CODE_BYTES = COLUMNS


class Step(NamedTuple):
    """Pieces `first` to first + 31 of a row."""

    first: int
    code_lanes: int  # lanes below it read codes
    lanes: int  # lanes below it have a piece; those that don't read codes read bfloat16


def steps(layout: KVFormat) -> list[Step]:
    pieces, code_pieces = layout.d // COLUMNS, layout.quantised_columns // COLUMNS
    return [
        Step(
            first=first,
            code_lanes=min(max(code_pieces - first, 0), LANES),
            lanes=min(pieces - first, LANES),
        )
        for first in range(0, pieces, LANES)
    ]


def check_alignment(layout: KVFormat, page_size: int) -> None:
    """NotImplementedError unless every piece can be read and written in one access."""
    sizes = [(layout.plain, WRITTEN_BYTES)]
    if layout.quantised is not None:
        sizes.append((layout.quantised.codes, CODE_BYTES))
    for field, size in sizes:
        places = (
            layout.first_byte(field, page_size),
            layout.token_stride(field),
            layout.page_stride(page_size),
        )
        if field.size % size or any(place % size for place in places):
            raise NotImplementedError(
                f"kv_format must keep pieces of {size} bytes at multiples of {size}; "
                f"{layout.name} with pages of {page_size} tokens doesn't"
            )
    if layout.quantised is not None and layout.quantised.group % COLUMNS:
        raise NotImplementedError(
            f"kv_format must have groups of a multiple of {COLUMNS} columns; got {layout.name}"
        )
