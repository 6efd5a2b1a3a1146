"""A sparse prefill result as the judge reads it: form checked, rows of out found by token."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import ml_dtypes
import numpy as np
import torch
from jaxtyping import BFloat16, Int64, Shaped
from torch import Tensor

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.device import rows_at, upload
from compare.protocol.verdict import Status


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormFault:
    """A result that can't be compared at all: the status, and what was got and what is due."""

    status: Status
    reason: str


def check_form(inputs: SparsePrefillInputs, result: SparsePrefillResult) -> FormFault | None:
    """Shapes first, then dtypes: out bfloat16 [T, H, 512] (or [R, 512] with out_rows), lse and
    max_logits float32 [T, H].
    """
    T, H, _ = inputs.q.shape
    return form_fault(result, T, H, inputs.d_v)


def form_fault(result: SparsePrefillResult, T: int, H: int, d_v: int) -> FormFault | None:
    """As check_form, of a result of T tokens and H heads."""
    rows = result.out_rows
    tensors: list[tuple[str, np.ndarray, tuple[int, ...], np.dtype]] = [
        (
            "out",
            result.out,
            (T, H, d_v) if rows is None else (len(rows), d_v),
            np.dtype(ml_dtypes.bfloat16),
        ),
        ("lse", result.lse, (T, H), np.dtype(np.float32)),
    ]
    if result.max_logits is not None:
        tensors.append(("max_logits", result.max_logits, (T, H), np.dtype(np.float32)))
    for name, array, shape, _ in tensors:
        if tuple(array.shape) != shape:
            return FormFault(
                status=Status.SHAPE,
                reason=f"{name} has the shape {list(array.shape)}; {list(shape)} is due",
            )
    if rows is not None:
        if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
            return FormFault(
                status=Status.SHAPE,
                reason=f"out_rows is {rows.dtype} {list(rows.shape)}; whole numbers [R] are due",
            )
        if not len(rows) and T * H:
            return FormFault(
                status=Status.SHAPE,
                reason=f"out_rows is empty: at least one of the {T * H} rows of out is due",
            )
        if len(np.unique(rows)) != len(rows) or ((rows < 0) | (rows >= T * H)).any():
            return FormFault(
                status=Status.SHAPE,
                reason=f"out_rows must be distinct numbers token * H + head from 0 to {T * H - 1}",
            )
    for name, array, _, dtype in tensors:
        if array.dtype != dtype:
            return FormFault(
                status=Status.DTYPE, reason=f"{name} is {array.dtype.name}; {dtype.name} is due"
            )
    return None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OutBlock:
    """Rows of out on a device: values [m, 512] at the places `at` (i * H + head for the i-th token
    of the block). whole: every row of the block is there, in order.
    """

    at: Int64[np.ndarray, " m"]
    values: BFloat16[Tensor, "m 512"]
    whole: bool

    @cached_property
    def magnitudes(self) -> Shaped[Tensor, "m 512"]:
        """int16: the bits without the sign. 0x7F80 is infinity, what is larger is NaN."""
        return self.values.view(torch.int16) & 0x7FFF

    def of(self, rows: Shaped[Tensor, "R ..."]) -> Shaped[Tensor, "m ..."]:
        """Those rows of a block of all places that are here."""
        return rows if self.whole else rows[torch.from_numpy(self.at).to(rows.device)]


class ResultView:
    """Rows of one result by token; nothing is copied before it is asked for."""

    def __init__(
        self, result: SparsePrefillResult, *, merges_parts: bool = False, rounded_parts: int = 0
    ) -> None:
        """merges_parts: results over parts of a row's keys were merged. rounded_parts: how often
        these were rounded to bfloat16.
        """
        self.result = result
        self.merges_parts = merges_parts
        self.rounded_parts = rounded_parts
        self.heads = result.lse.shape[1]
        self._order: np.ndarray | None = None
        self._sorted: np.ndarray | None = None
        if result.out_rows is not None:
            rows = result.out_rows.astype(np.int64)
            self._order = np.argsort(rows, kind="stable")
            self._sorted = rows[self._order]

    @property
    def rows(self) -> int:
        """How many (token, head) rows of out there are."""
        return len(self._sorted) if self._sorted is not None else self.result.lse.size

    def out(
        self, tokens: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " m"], Shaped[np.ndarray, "m 512"]]:
        """The rows of out that these tokens have: their places in the block (i * H + head for
        tokens[i]) and their values.
        """
        H = self.heads
        if self._sorted is None or self._order is None:
            out = rows_at(self.result.out, tokens)
            return np.arange(len(tokens) * H), out.reshape(len(tokens) * H, -1)
        first = np.searchsorted(self._sorted, tokens * H)
        last = np.searchsorted(self._sorted, (tokens + 1) * H)
        at = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        at = at.astype(np.int64)
        local = np.repeat(np.arange(len(tokens)), last - first)
        return local * H + self._sorted[at] % H, self.result.out[self._order[at]]

    def block(self, tokens: Int64[np.ndarray, " n"], device: str | None) -> OutBlock:
        """The rows of out that these tokens have, carried to a device."""
        at, out = self.out(tokens)
        whole = len(at) == len(tokens) * self.heads
        return OutBlock(at=at, values=upload(out, device), whole=whole)

    def statistics(self, tokens: Int64[np.ndarray, " n"]) -> dict[str, Shaped[np.ndarray, "n H"]]:
        """lse, and max_logits where the result has it."""
        found = {"lse": rows_at(self.result.lse, tokens)}
        if self.result.max_logits is not None:
            found["max_logits"] = rows_at(self.result.max_logits, tokens)
        return found
