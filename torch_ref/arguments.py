"""Checks that prefill and decode share; a ValueError names the argument, what it was, what fits."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def finite_scale(scale: float, name: str = "sm_scale") -> float:
    """`scale` as a float; ValueError unless it is a real number that is finite in fp32."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise ValueError(f"{name}: {scale!r}; accepted is a finite number")
    try:
        number = float(scale)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > torch.finfo(torch.float32).max:
        raise ValueError(f"{name}: {number}; accepted is a number that is finite in fp32")
    return number


def token_rows(rows: Sequence[int] | Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """`rows` as int64 on `device`, all tokens for None; ValueError outside 0..tokens - 1."""
    if rows is None:
        return torch.arange(tokens, device=device)
    try:
        chosen = torch.as_tensor(rows, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"rows: {rows!r}; accepted is a list of token rows") from error
    if chosen.numel() == 0:
        chosen = chosen.reshape(-1).long()
    if chosen.ndim != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool:
        raise ValueError(
            f"rows: {chosen.dtype} {shape_of(chosen)}; accepted is a list of token rows"
        )
    outside = (chosen < 0) | (chosen >= tokens)
    if bool(outside.any()):
        raise ValueError(f"rows: {int(chosen[outside][0])}; accepted are rows 0 to {tokens - 1}")
    return chosen.long()


def require_tensor(name: str, value: object, *dtypes: torch.dtype) -> None:
    """ValueError unless `value` is a dense tensor of one of these dtypes, without a gradient."""
    accepted = " or ".join(str(dtype) for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name}: {type(value).__name__}; accepted is a torch tensor of {accepted}"
        )
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {value.dtype}; accepted is {accepted}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name}: layout {value.layout}; accepted is a dense tensor")
    if value.requires_grad:
        raise ValueError(f"{name}: requires a gradient; accepted is one without, as of detach()")


def require_device(tensors: Mapping[str, Tensor | None], device: torch.device) -> None:
    """ValueError unless every tensor lies on q's device; None is passed over."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}; q is on {device}, use one device")


def shape_of(tensor: Tensor) -> str:
    """The shape as an error names it."""
    return str(list(tensor.shape))
