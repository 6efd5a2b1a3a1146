"""Checks that the index builders share; a ValueError names the argument, what it was, what fits."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from torch_ref.arguments import require_tensor, shape_of
from torch_ref.kv_cache.paging import MAX_INT32


def whole(name: str, value: object, least: int) -> int:
    """`value` as an int of `least` or more."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{name}: {value!r}; accepted are whole numbers") from error
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}: {value!r}; accepted are {least} and more")
    return number


def vector(name: str, tensor: Tensor, size: int, *dtypes: torch.dtype) -> Tensor:
    """`tensor` if it is one entry for each of `size`, int32 unless other dtypes are given."""
    require_tensor(name, tensor, *(dtypes or (torch.int32,)))
    if tensor.shape != (size,):
        raise ValueError(f"{name}: shape {shape_of(tensor)}; accepted is [{size}]")
    return tensor


def table(name: str, tensor: Tensor, rows: int | None) -> Tensor:
    """`tensor` if it is an int32 matrix with `rows` rows (any number for None)."""
    require_tensor(name, tensor, torch.int32)
    if tensor.ndim != 2 or rows not in (None, len(tensor)):
        accepted = "n" if rows is None else rows
        raise ValueError(f"{name}: shape {shape_of(tensor)}; accepted is [{accepted}, columns]")
    return tensor


def one_device(**tensors: Tensor | None) -> None:
    """ValueError unless all tensors lie on the first one's device; None is passed over."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, *others = present.items()
    for name, tensor in others:
        if tensor.device != first[1].device:
            raise ValueError(
                f"{name}: on {tensor.device}; {first[0]} is on {first[1].device}, use one device"
            )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def list_width(multiple: int, **parts: int) -> int:
    """Columns of a list that has room for all parts, which are named as arguments are."""
    width = round_up(sum(parts.values()), multiple)
    most = MAX_INT32 // multiple * multiple
    if width > most:
        values = ", ".join(f"{name} = {value}" for name, value in parts.items())
        raise ValueError(
            f"{max(parts, key=lambda name: parts[name])}: lists would be {width} columns wide, of "
            f"{values}; accepted are {most} columns, which int32 numbers"
        )
    return width


def first_true(where: Tensor) -> list[int]:
    """The place of the first True."""
    return where.nonzero()[0].tolist()
