"""From a position of a request to a slot of its cache: `table[b, p // P] * P + p % P`."""

from __future__ import annotations

import torch
from jaxtyping import Int, Int32, Int64
from torch import Tensor

MAX_INT32 = 2**31 - 1


def position_slots(
    block_table: Int32[Tensor, "n columns"],
    request: Int[Tensor, "..."],
    position: Int[Tensor, "..."],
    *,
    page_size: int,
    num_pages: int | None = None,
    name: str = "block_table",
) -> Int64[Tensor, "..."]:
    """Slots of positions (0 and more) of requests (rows of the table), any shape, in int64.

    ValueError: a position past the table's columns; a page below 0 or, where num_pages is given,
    at or past it; a slot beyond int32. `name` is what the error calls the table. Entries that no
    position needs are not looked at.
    """
    request, position = request.long(), position.long()
    column = position // page_size
    columns = block_table.shape[1]
    outside = (column < 0) | (column >= columns)
    if bool(outside.any()):
        raise ValueError(
            f"{name}: {columns} columns; position {_first(position, outside)} of request "
            f"{_first(request, outside)} lies in column {_first(column, outside)} of pages of "
            f"{page_size}"
        )
    page = block_table.long()[request, column]
    wrong = page < 0
    accepted = "0 and more"
    if num_pages is not None:
        wrong = wrong | (page >= num_pages)
        accepted = f"0 to {num_pages - 1}"
    if bool(wrong.any()):
        raise ValueError(
            f"{name}: page {_first(page, wrong)} at column {_first(column, wrong)} of request "
            f"{_first(request, wrong)}, whose position {_first(position, wrong)} lies there; "
            f"accepted are pages {accepted}"
        )
    slot = page * page_size + position % page_size
    beyond = slot > MAX_INT32
    if bool(beyond.any()):
        raise ValueError(
            f"{name}: page {_first(page, beyond)} of {page_size} gives slot "
            f"{_first(slot, beyond)}; accepted are slots to {MAX_INT32}, which int32 holds"
        )
    return slot


def _first(values: Tensor, where: Tensor) -> int:
    values, where = torch.broadcast_tensors(values, where)
    return int(values[where].flatten()[0])
